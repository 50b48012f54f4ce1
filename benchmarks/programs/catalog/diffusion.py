"""Diffusion models."""

from benchmarks.programs.program import TARGETS, Program

PROGRAMS = (
    Program(
        "guided-diffusion image_train.py",
        "diffusion",
        "openai/guided-diffusion",
        "22e0df8183507e13a7813f8d38d51b072ca1e67c",
        command="{drivers}/seeded.py scripts/image_train.py --data_dir data --image_size 64 "
        "--num_channels 32"
        " --num_res_blocks 1 --attention_resolutions 16 --batch_size 2 --lr_anneal_steps 3 "
        "--log_interval 1",
        given="eight images of noise; random weights; three steps; seeded, which it does not do "
        "itself",
        inputs="flat_images",
        needs=("blobfile", "tqdm", "mpi4py", "mpich"),
        loss=r"\| loss +\| ([\d.]+) +\|",
    ),
    Program(
        "EDM train.py",
        "diffusion",
        "NVlabs/edm",
        "008a4e5316c8e3bfe61a62f874bddba254295afb",
        command="train.py --outdir=out --data=data --batch=4 --duration=0.000004 --seed=0 "
        "--cbase=16 --cres=1,1"
        " --tick=1 --snap=1 --dump=1 --workers=1",
        own=None,
        given="eight images of noise; random weights; one step",
        inputs="flat_images",
        needs=("click", "psutil", "scipy", "pillow"),
        log="out/*/stats.jsonl",
        faults={
            "object.__init__": (
                "the program's: it gives torch's Sampler an argument that torch does not take any "
                "more"
            )
        },
        loss=r'"Loss/loss": \{"num": \d+, "mean": ([\d.]+)',
    ),
    Program(
        "diffusers train_unconditional.py",
        "diffusion",
        "huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        command="{drivers}/seeded.py examples/unconditional_image_generation/train_unconditional.py"
        " --train_data_dir data --resolution 32 --train_batch_size 4 --num_epochs 1 --output_dir "
        "out"
        " --model_config_name_or_path unet --ddpm_num_inference_steps 2 --eval_batch_size 1 "
        "--dataloader_num_workers 0",
        paths=("src",),
        given="eight images of noise; random weights; two steps; seeded, which it does not do "
        "itself",
        inputs="diffusers",
        needs=("accelerate", "datasets", "torchvision", "tensorboard", "requests"),
        loss=r"loss=([\d.]+)",
    ),
    Program(
        "ComfyUI, a workflow from text to an image",
        "diffusion",
        "Comfy-Org/ComfyUI",
        "a125cd84b054a57729b5eecab930ca9408719832",
        command="{drivers}/comfyui_workflow.py",
        own="--cpu",
        parts=("/*", "!/comfy/text_encoders/llama_tokenizer/"),
        given="its server with default flags, to which the workflow is sent by its API; random "
        "weights of a small"
        " Stable Diffusion 3; an image of 64 pixels, two steps",
        inputs="comfyui",
        needs=(
            "torchvision",
            "torchsde",
            "einops",
            "transformers",
            "tokenizers",
            "sentencepiece",
            "safetensors",
            "aiohttp",
            "alembic",
            "SQLAlchemy",
            "av",
            "kornia",
            "spandrel",
            "pydantic-settings",
            "comfyui-frontend-package",
        ),
        targets=(*TARGETS, "simulated:mps"),
        result=r"image: (.*)",
        differs="on a GPU its networks compute in half precision",
    ),
)
