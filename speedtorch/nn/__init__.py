"""Embedding, EmbeddingBag and collections with host tables, prefetch loops and graphed steps."""
