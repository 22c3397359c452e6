"""Where λ-GELU lives in models: names, sites, loading, surgery, rewriting configs, profiles, and an MLP."""

# While no module of this room is half imported: importing it has the room extend it (`hf_lgelu/__init__.py`).
import transformers.modeling_utils  # noqa: F401
