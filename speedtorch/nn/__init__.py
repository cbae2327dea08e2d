"""Modules: Embedding, EmbeddingBag, and batches ahead of them."""
