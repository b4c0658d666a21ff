"""The planner: which tensors to compress, where, and over which collectives; and whether compression pays off at all.

`profile` and `models` describe the backward pass, `costs` the time of each action, `timeline` simulates a step,
`search` finds the best strategies, `plan` saves them, `advise` compares whole methods. Importing any of them imports no
toolkit. `grace.communicators.planned.strategy` has the tree of strategies.

Z. Wang, H. Lin, Y. Zhu, T. S. E. Ng, "Hi-Speed DNN Training with Espresso", EuroSys 2023.
"""
