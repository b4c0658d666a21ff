"""Which tensor is compressed, where, and over which collectives; and whether compression pays at all.

`options` is the tree of strategies, `profile` and `models` say what a backward pass yields when, `costs` what each
action takes, `timeline` when everything ends, `search` which strategies are best, `plan` writes them down, `advise`
compares whole methods. Importing any of them imports no toolkit.

Z. Wang, H. Lin, Y. Zhu, T. S. E. Ng, "Hi-Speed DNN Training with Espresso", EuroSys 2023.
"""
