"""Two processes: one publishes weights, the other follows, over a shared folder or over HTTP.

python examples/patch_processes.py publish FOLDER [PORT]     # with PORT it serves the folder
python examples/patch_processes.py follow FOLDER [URL]       # with URL it copies the versions to FOLDER first
"""

import functools
import http.server
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

import grace

VERSIONS, INDEX = 5, "model.safetensors.index.json"


def publish(folder, port=None):
    weights, draw = {"w": np.zeros((1000, 100), np.float16)}, np.random.default_rng(0)
    publisher = grace.patch.Publisher(folder)
    for _ in range(VERSIONS):
        publisher.publish(weights)
        weights["w"] += (draw.random(weights["w"].shape) < 0.02).astype(np.float16)
    if port is not None:
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
        server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("serving", flush=True)
        sys.stdin.read()


def copy(url, folder, version):
    """Copy a version's files, the index last, as they were written; False if there is none yet."""
    name, here = f"weight_v{version:06d}", Path(folder, f"weight_v{version:06d}")
    try:
        index = urllib.request.urlopen(f"{url}/{name}/{INDEX}").read()
    except urllib.error.HTTPError:
        return False
    here.mkdir(parents=True, exist_ok=True)
    file = "model-00000-of-00001.safetensors"
    urllib.request.urlretrieve(f"{url}/{name}/{file}", here / file)
    (here / INDEX).write_bytes(index)
    return True


def follow(folder, url=None):
    weights, receiver = {"w": np.empty((1000, 100), np.float16)}, grace.patch.Receiver(folder)
    while receiver.version != VERSIONS - 1:
        if url is None or copy(url, folder, (-1 if receiver.version is None else receiver.version) + 1):
            receiver.update(weights)
        time.sleep(0.05)
        print("version", receiver.version, "sum", float(weights["w"].sum(dtype=np.float64)), flush=True)


if __name__ == "__main__":
    {"publish": publish, "follow": follow}[sys.argv[1]](*sys.argv[2:])
