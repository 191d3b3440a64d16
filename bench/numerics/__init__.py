"""How passes over several rows round, compared with passes over one row."""
