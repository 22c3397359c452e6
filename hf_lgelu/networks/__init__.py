"""Looks at networks, and changes none for good: runs, batches, masks, outputs, calls, sites, data flow."""
