"""Neural drafters, and the drafter of a session with its n-grams."""
