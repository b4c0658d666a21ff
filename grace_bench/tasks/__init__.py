"""Whole trainings with every method: `grace bench tasks`.

`data` makes or reads data sets, `tasks` defines each task's training and metric, `torch_models` and `keras_models` hold
the models, `worker` is the process that trains, `plan` defines the measurements, `run` starts the processes and stores
their results, `show` makes tables, plots and the page, `cluster` writes scripts for a cluster. Importing this package
imports no toolkit.
"""
