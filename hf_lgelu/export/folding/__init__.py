"""Folding λ into the weights around each activation: the data flow, the plan, the change."""
