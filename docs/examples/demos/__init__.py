"""Demonstrations: programs that train models with tables or layers in host memory.

| command         | main module | data                            | model      |
|-----------------|-------------|---------------------------------|------------|
| `demo word2vec` | `word2vec`  | `corpus`, `pairs`               | `skipgram` |
| `demo glove`    | `glove_run` | `cooccurrence`, `glove_batches` | `glove`    |
| `demo ncf`      | `ncf`       | `ratings`, `ranking`            | `neumf`    |
| `demo dlrm`     | `dlrm_run`  | `criteo`, `click_batches`       | `dlrm`     |
| `demo experts`  | `experts`   | `experts`                       | `experts`  |

All use `session` and `settings`, for the device and the options, and `report`, which prints and
saves the results. `loop` trains all models but the experts. `plain` is an optimizer in plain torch,
and `comparison` compares a run with plain torch. `evaluate` scores word vectors. `processes` are
the processes of torchrun, which only the DLRM uses.
"""
