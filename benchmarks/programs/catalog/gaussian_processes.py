"""Programs with Gaussian processes."""

from benchmarks.programs.program import Program

_GPYTORCH = "cornellius-gp/gpytorch", "7c4ec80f0f05cf530348a8a8972d67a11dd26ed2"
_NEEDS = ("gpytorch", "ipython", "nbformat", "matplotlib", "tqdm", "ipywidgets", "scipy")

PROGRAMS = (
    Program(
        "GPyTorch Simple_GP_Regression_CUDA.ipynb",
        "Gaussian processes",
        *_GPYTORCH,
        command="{drivers}/seeded.py -m IPython "
        "examples/02_Scalable_Exact_GPs/Simple_GP_Regression_CUDA.ipynb",
        own=None,
        given="the notebook's own 100 points; 50 steps; seeded, which it does not do itself",
        needs=_NEEDS,
        loss=r"Iter 50/50 - Loss: (-?[\d.]+)",
    ),
    Program(
        "GPyTorch SGPR_Regression_CUDA.ipynb",
        "Gaussian processes",
        *_GPYTORCH,
        command="{drivers}/seeded.py -m IPython "
        "examples/02_Scalable_Exact_GPs/SGPR_Regression_CUDA.ipynb",
        given="the notebook's own random points (CI=1); two steps; seeded, which it does not do "
        "itself",
        environment={"CI": "1"},
        needs=_NEEDS,
        result=r"Test MAE: ([\d.]+)",
    ),
)
