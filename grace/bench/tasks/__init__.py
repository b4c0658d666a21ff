"""Whole trainings with every method: `grace bench tasks`.

`data` makes or reads what is learnt, `tasks` says what is trained on it and how that is judged, `torch_models` and
`keras_models` hold the models, `worker` is the process that trains, `plan` says what is measured, `run` starts the
processes and keeps what they find, `show` makes tables, plots and the page, `cluster` writes scripts for a cluster.
Importing this imports no toolkit.
"""
