"""Modules with host tables: Embedding, EmbeddingBag, collections, prefetch and graphed steps."""
