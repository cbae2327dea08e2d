"""Demonstrations: programs that train models with tables or layers in host memory.

| command         | description | data                      | model      |
|-----------------|-------------|---------------------------|------------|
| `demo word2vec` | `word2vec`  | `corpus`, `pairs`         | `skipgram` |
| `demo glove`    | `glove_run` | `cooccurrence`            | `glove`    |
| `demo ncf`      | `ncf`       | `ratings`, `ranking`      | `neumf`    |
| `demo dlrm`     | `dlrm_run`  | `criteo`, `click_batches` | `dlrm`     |
| `demo experts`  | `experts`   | `experts`                 | `experts`  |

Each description is a subclass of `runner.Demo`: settings, data, model, score and report. `runner`
runs any of them with `loop`, which trains on `batches`, and `report`, which saves the results.
`word_vectors` is shared by word2vec and GloVe. `plain` is an optimizer in plain torch, and
`comparison` compares a run with plain torch. `processes` are the processes of torchrun, which only
the DLRM uses.
"""
