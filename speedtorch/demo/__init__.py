"""The demonstrations: models on real data, trained on tables in host memory.

`python -m speedtorch demo word2vec` runs the first: `corpus` and `pairs` make batches out of text,
`skipgram` is the model, `plain` steps the same in plain torch to compare with, `evaluate` scores,
and `word2vec` puts them together.

`python -m speedtorch demo glove` runs GloVe on `speedtorch.Embedding`: `cooccurrence` counts word
pairs, `glove_batches` makes batches of them, `glove` is the model, and `glove_run` puts them
together.

`python -m speedtorch demo ncf` runs a recommender: `ratings` reads a file or makes ratings up,
`ranking` makes batches and scores, `neumf` is the model, and `ncf` puts them together.

`python -m speedtorch demo dlrm` runs a click model: `criteo` reads a file or makes one up,
`click_batches` makes batches, `dlrm` is the model, and `dlrm_run` puts them together.

All share `loop`, which trains, `settings` and `session`, which ask the user and the machine, and
`report`, which tells and saves; `processes` are those that torchrun begins, which the click model
knows of.
"""
