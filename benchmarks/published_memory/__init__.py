"""Published peaks of memory on GPUs, beside the predictions of a plan of the same program.

``python -m benchmarks.published_memory qwen --checkout FOLDER --write`` plans the rows of one
source, each in a process of its own, and keeps what it found in ``results.json``.
``docs/make_published.py`` makes the page of it. A source needs a checkout where its programs are
its own code; no weights are needed, because nothing is computed.
"""
