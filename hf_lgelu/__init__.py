"""λ-GELU for the Hugging Face ecosystem."""
