"""Several requests on one model: jobs, their slots, whose turn it is."""
