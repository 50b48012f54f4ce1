"""Programs with graphs."""

from benchmarks.programs.program import Program

PROGRAMS = (
    Program(
        "PyG mutag_gin.py",
        "graphs",
        "pyg-team/pytorch_geometric",
        "5c6461b2305ad068a6d61165b3c55852a11aaa41",
        command="{drivers}/seeded.py examples/mutag_gin.py --epochs 5",
        given="120 synthetic graphs in the format of MUTAG; random weights; five epochs; seeded, "
        "which it does not do"
        " itself",
        inputs="mutag",
        needs=("torch_geometric's dependencies",),
        loss=r"Epoch: 0*5, Loss: ([\d.]+)",
    ),
    Program(
        "examples/gat",
        "graphs",
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        command="main.py --epochs 5 --val-every 1 --hidden-dim 16 --num-heads 2",
        folder="gat",
        own="--no-accel",
        given="2,000 synthetic papers in the format of Cora; random weights; five epochs",
        inputs="cora",
        needs=("requests",),
        loss=r"Test set results: loss ([\d.]+)",
    ),
)
