"""Where λ-GELU lives in models: names, sites, loading, surgery, rewriting configs, profiles, and an MLP."""
