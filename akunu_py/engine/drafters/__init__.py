"""Neural drafters, and the pool of drafters with their n-grams."""
