"""Demonstrations: programs that train models with tables or layers in host memory.

| command         | module     | data                      |
|-----------------|------------|---------------------------|
| `demo word2vec` | `word2vec` | `corpus`, `pairs`         |
| `demo glove`    | `glove`    | `corpus`, `cooccurrence`  |
| `demo ncf`      | `ncf`      | `ratings`, `ranking`      |
| `demo dlrm`     | `dlrm`     | `criteo`, `click_batches` |
| `demo experts`  | `experts`  | `experts`                 |

Each module has the settings, the model and a subclass of `runner.Demo`, which describes the data,
the score and the results. `runner` runs each demonstration: `loop` trains on `batches`, `report`
prints and saves the results, and `comparison` compares them with plain torch. `word_vectors` is
the common part of word2vec and GloVe. `plain` is an optimizer in plain torch. `processes` are the
processes of torchrun, which only the DLRM uses.
"""
