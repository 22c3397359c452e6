"""One table a measurement, one over all, and what they rest on."""
