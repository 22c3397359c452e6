"""Where λ-GELU lives: in transformers and timm by name, in any module by surgery."""
