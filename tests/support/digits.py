"""A network of two layers for handwritten digits, in NumPy."""

import numpy as np
from sklearn.datasets import load_digits


def digits():
    data = load_digits()
    x, y = (data.images.reshape(-1, 64) / 16).astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(x))
    return x[order[:1344]], y[order[:1344]], x[order[1344:]], y[order[1344:]]


def gradient(p, x, y):
    hidden = np.maximum(x @ p["a"] + p["d"], 0)
    scores = np.exp(hidden @ p["b"] + p["c"])
    d = (scores / scores.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[y]) / len(x)
    back = (d @ p["b"].T) * (hidden > 0)
    return {"a": x.T @ back, "d": back.sum(0), "b": hidden.T @ d, "c": d.sum(0)}


def accuracy(p):
    _, _, x, y = digits()
    return 100 * float((np.argmax(np.maximum(x @ p["a"] + p["d"], 0) @ p["b"] + p["c"], 1) == y).mean())
