"""Programs about images."""

from benchmarks.programs.program import Program

_EXAMPLES = "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_OLD_TIMM = (
    "the program's: it asserts timm 0.3.2, which imports torch._six, and no supported torch has "
    "that"
)

PROGRAMS = (
    Program(
        "examples/vae",
        "vision",
        *_EXAMPLES,
        command="main.py --epochs 1 --log-interval 100",
        folder="vae",
        given="512 synthetic images in the format of MNIST; random weights; one epoch",
        inputs="mnist",
        needs=("torchvision",),
        loss=r"Test set loss: ([\d.]+)",
        differs="it draws noise on the GPU",
    ),
    Program(
        "airbench train94",
        "vision",
        "KellerJordan/cifar10-airbench",
        "f1c599c4af24aca803e3e65a6a7e52a502e09d0e",
        command="{drivers}/airbench_small.py",
        own=None,
        given="512 images of noise; a narrower network than its own, random weights, one epoch of "
        "batches of 64",
        inputs="cifar10",
        needs=("torchvision",),
        loss=r"\|\s+eval\s+\|\s+([\d.]+)",
        differs="it draws the order and the crops of images on the GPU",
    ),
    Program(
        "CLIP, the example of its README",
        "vision",
        "openai/CLIP",
        "d05afc436d78f1c48dc0dbf8e5980a9d471f35f6",
        command="{drivers}/clip_readme.py clip.pt data/0.png",
        given="one image of noise; random weights of a small model",
        inputs="clip_weights",
        needs=("torchvision", "ftfy", "regex", "tqdm"),
        result=r"Label probs: ([\d. ]+)",
        differs="on the GPU it computes in float16, on a CPU in float32; a CPU target sums such "
        "products in float32",
    ),
    Program(
        "open_clip_train",
        "vision",
        "mlfoundations/open_clip",
        "89fb801f1e6087880e951fc8354b8a2077b79c6d",
        command="-m open_clip_train.main --dataset-type synthetic --train-num-samples 12 "
        "--batch-size 4 --epochs 1"
        " --model ViT-S-32 --workers 1 --warmup 1 --lr 0.001 --log-every-n-steps 1",
        own="--device cpu",
        paths=("src",),
        given="the program's synthetic pairs; random weights of ViT-S-32; three steps",
        needs=("torchvision", "ftfy", "timm", "webdataset", "pandas"),
        loss=r"Contrastive_loss: [\d.]+ \(([\d.]+)\)",
        differs="it draws its weights on the GPU",
    ),
    Program(
        "Segment Anything scripts/amg.py",
        "vision",
        "facebookresearch/segment-anything",
        "dca509fe793f601edb92606367a655c15ac00fdf",
        command="scripts/amg.py --input data --output masks --model-type vit_b --checkpoint sam.pth"
        " --points-per-side 2 --pred-iou-thresh -100 --stability-score-thresh 0",
        own="--device cpu",
        given="one image of noise; random weights of vit_b",
        inputs="sam_weights",
        needs=("torchvision", "opencv-python-headless"),
        digest="masks/*/metadata.csv",
    ),
    Program(
        "SAM 2, the example of its README",
        "vision",
        "facebookresearch/sam2",
        "2b90b9f5ceec907a1c18123530e92e794ad901a4",
        command="{drivers}/sam2_image.py",
        own="cpu",
        given="one image of noise; random weights of the tiny model",
        needs=("torchvision", "hydra-core", "iopath", "tqdm"),
        result=r"scores: (.*)",
    ),
    Program(
        "DINOv2, a backbone by torch.hub",
        "vision",
        "facebookresearch/dinov2",
        "b8931f7bf91576930313be2c6d6af376033b35f0",
        command="{drivers}/dinov2_features.py",
        given="two random images; random weights of ViT-S/14",
        result=r"features: ([\d.]+)",
    ),
    Program(
        "detectron2 RetinaNet",
        "vision",
        "facebookresearch/detectron2",
        "02b5c4e295e990042a714712c21dc79b731e8833",
        command="{drivers}/detectron2_loss.py",
        own="cpu",
        given="one random image; random weights; three steps",
        inputs="detectron2",
        needs=("torchvision", "fvcore", "iopath", "yacs", "omegaconf", "pycocotools"),
        loss=r"total_loss: ([\d.]+)",
        differs="on a CPU target autocast is in another dtype than float16",
    ),
    Program(
        "MAE main_pretrain.py",
        "vision",
        "facebookresearch/mae",
        "efb2a8062c206524e35e47d04501ed4f544c0ae8",
        command="main_pretrain.py --data_path data --epochs 1 --batch_size 2 --num_workers 0",
        own="--device cpu",
        given="eight images of noise; random weights",
        inputs="images",
        needs=("torchvision", "timm", "tensorboard"),
        loss=r"train_loss: ([\d.]+)",
        faults={"AssertionError": _OLD_TIMM},
    ),
    Program(
        "DeiT main.py",
        "vision",
        "facebookresearch/deit",
        "7e160fe43f0252d17191b71cbb5826254114ea5b",
        command="main.py --model deit_tiny_patch16_224 --data-path data --batch-size 2 --epochs 1 "
        "--num_workers 0",
        own="--device cpu",
        given="eight images of noise; random weights",
        inputs="images",
        needs=("torchvision", "timm"),
        loss=r"loss: [\d.]+ \(([\d.]+)\)",
        faults={
            "_pil_interp": "the program's: it is written for timm 0.3.2, which imports torch._six"
        },
    ),
    Program(
        "YOLOv5 train.py",
        "vision",
        "ultralytics/yolov5",
        "5081342f04fb287fc2e5f2b5a4e06752b7937b1c",
        command="train.py --device 0 --weights '' --cfg models/yolov5n.yaml --data data/tiny.yaml "
        "--img 64"
        " --batch-size 4 --epochs 1 --workers 0 --noplots",
        own="--device cpu",
        given="eight images of noise with two boxes each; random weights; one epoch, in autocast "
        "on a GPU",
        inputs="yolov5",
        environment={
            "YOLOv5_AUTOINSTALL": "false",
            "YOLO_AUTOINSTALL": "false",
            "YOLO_OFFLINE": "true",
        },
        needs=("torchvision", "ultralytics", "opencv-python", "pandas", "matplotlib", "seaborn"),
        log="runs/train/exp/results.csv",
        loss=r"\n +0, +([\d.]+),",
        differs="on a GPU it trains in autocast",
    ),
    Program(
        "YOLOX tools/train.py --fp16",
        "vision",
        "Megvii-BaseDetection/YOLOX",
        "6ddff4824372906469a7fae2dc3206c7aa4bbaee",
        command="{drivers}/seeded.py tools/train.py -f exps/default/yolox_nano.py -d 1 -b 4 --fp16 "
        "data_dir data"
        " train_ann boxes.json val_ann boxes.json num_classes 2 max_epoch 1 warmup_epochs 0 "
        "no_aug_epochs 0"
        " eval_interval 100 input_size 64,64 multiscale_range 0 data_num_workers 0 print_interval "
        "1",
        own=None,
        given="eight images of noise with two boxes each; random weights; one "
        "epoch; seeded by ours",
        inputs="yolox",
        needs=(
            "torchvision",
            "opencv-python",
            "loguru",
            "tabulate",
            "thop",
            "pycocotools",
            "tensorboard",
        ),
        loss=r"total_loss: ([\d.]+)",
        differs="on a CPU target autocast is in another dtype than float16",
    ),
    Program(
        "RT-DETRv2 tools/train.py --use-amp",
        "vision",
        "lyuwenyu/RT-DETR",
        "068dfde65f2667ad6555883c69d73de886518cad",
        command="tools/train.py -c tiny.yml --use-amp --seed 0",
        own="--device cpu",
        parts=("/rtdetrv2_pytorch/",),
        folder="rtdetrv2_pytorch",
        given="eight images of noise with two boxes each; random weights of its smallest model; "
        "one epoch and a"
        " validation, in autocast",
        inputs="rtdetr",
        needs=("torchvision", "faster-coco-eval", "tensorboard", "matplotlib"),
        loss=r"Averaged stats: lr: \S+ .*?loss: [\d.]+ \(([\d.]+)\)",
        differs="it draws noise on the GPU; a CPU's autocast has another dtype and other lists of "
        "operators",
    ),
)
