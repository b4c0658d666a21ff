"""How long methods take, `grace bench kernels`, and what they do to trainings, `grace bench tasks`.

`plan` says what is measured, `kernels` starts the processes and joins what they find, `worker` is such a process,
`subjects` and `peers` are what it measures, `memory` is a process that counts, `show` prints and plots. Importing this
imports no toolkit.
"""
