"""Sends ComfyUI's server a workflow by its API: ``comfyui_workflow.py FLAGS OF MAIN.PY``."""

import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

WORKFLOW = {
    "sampler": {
        "class_type": "KSampler",
        "inputs": {
            "model": ["checkpoint", 0],
            "positive": ["positive", 0],
            "negative": ["negative", 0],
            "latent_image": ["latent", 0],
            "seed": 1,
            "steps": 2,
            "cfg": 4,
            "sampler_name": "euler",
            "scheduler": "normal",
            "denoise": 1,
        },
    },
    "checkpoint": {
        "class_type": "CheckpointLoaderSimple",
        "inputs": {"ckpt_name": "small.safetensors"},
    },
    "latent": {
        "class_type": "EmptySD3LatentImage",
        "inputs": {"batch_size": 1, "height": 64, "width": 64},
    },
    "positive": {
        "class_type": "CLIPTextEncode",
        "inputs": {"clip": ["checkpoint", 1], "text": "an old dog"},
    },
    "negative": {
        "class_type": "CLIPTextEncode",
        "inputs": {"clip": ["checkpoint", 1], "text": "a cat"},
    },
    "decode": {
        "class_type": "VAEDecode",
        "inputs": {"samples": ["sampler", 0], "vae": ["checkpoint", 2]},
    },
    "save": {
        "class_type": "SaveImage",
        "inputs": {"filename_prefix": "small", "images": ["decode", 0]},
    },
}


def ask(path: str, data: object = None) -> dict:
    """Return the server's answer, and wait for the server first."""
    sent = None if data is None else json.dumps(data).encode()
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/{path}", sent) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error
        except urllib.error.URLError:
            time.sleep(0.2)
    raise TimeoutError("the server did not start")


def run() -> None:
    """Send the workflow, print what became of it, and stop the server."""
    try:
        number = ask("prompt", {"prompt": WORKFLOW})["prompt_id"]
        while not (done := ask(f"history/{number}")):
            time.sleep(0.1)
        print(
            "status:",
            done[number]["status"]["status_str"],
            *done[number]["status"]["messages"][-1:],
        )
        for path in sorted(Path("output").glob("*.png")):
            image = np.asarray(Image.open(path)).astype(float)
            print(f"image: {image.shape}, mean {image.mean():.2f}, deviation {image.std():.2f}")
    finally:
        os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C, which ends its server


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
threading.Thread(target=run, daemon=True).start()
sys.argv[:] = ["main.py", "--port", str(PORT), *sys.argv[1:]]
runpy.run_path("main.py", run_name="__main__")
