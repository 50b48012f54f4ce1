"""Makes programs' inputs in the current folder, without downloads: ``python inputs.py NAME``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

INPUTS: dict[str, Callable[[], None]] = {}
"""The functions, by name."""


def inputs(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to :data:`INPUTS`."""
    INPUTS[function.__name__] = function
    return function


def words(count: int, seed: int = 0) -> str:
    """Return a text of words that follow each other by a rule, so that a model can learn it."""
    random = np.random.default_rng(seed)
    known = [
        "the",
        "a",
        "dog",
        "cat",
        "runs",
        "sleeps",
        "under",
        "over",
        "old",
        "tree",
        "house",
        "and",
        "then",
        ".",
    ]
    follows = random.integers(0, len(known), (len(known), 3))
    word, text = 0, []
    for choice in random.integers(0, 3, count):
        text.append(known[word])
        word = follows[word, choice]
    return " ".join(text)


@inputs
def nanogpt() -> None:
    """A text by characters, as nanoGPT's ``prepare.py`` writes it."""
    folder = Path("data/shakespeare_char")
    data = np.frombuffer(words(20_000).encode(), dtype=np.uint8).astype(np.uint16) % 64
    data[:-2000].tofile(folder / "train.bin")
    data[-2000:].tofile(folder / "val.bin")


@inputs
def mnist() -> None:
    """The files of MNIST, with noise in which a bright row says the class."""
    folder = Path("../data/MNIST/raw")
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 512), ("t10k", 128)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = random.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        images[np.arange(count), 2 * labels + 4] = 255
        heads = (b"\x00\x00\x08\x03" + _sizes(count, 28, 28), b"\x00\x00\x08\x01" + _sizes(count))
        (folder / f"{name}-images-idx3-ubyte").write_bytes(heads[0] + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(heads[1] + labels.tobytes())


def _sizes(*sizes: int) -> bytes:
    return b"".join(size.to_bytes(4, "big") for size in sizes)


def _images(folder: Path, count: int, size: int) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(len(str(folder)))
    for number in range(count):
        Image.fromarray(random.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )


@inputs
def images() -> None:
    """Eight images of 32 pixels, four each of two classes, for training and for validation."""
    for name in ("train/ant", "train/bee", "val/ant", "val/bee"):
        _images(Path("data", name), 4, 32)


@inputs
def flat_images() -> None:
    """Eight images of 32 pixels."""
    _images(Path("data"), 8, 32)


@inputs
def yolov5() -> None:
    """Eight images of 64 pixels with two boxes each for YOLO, and the font it would download."""
    import matplotlib

    for part in ("train", "val"):
        _images(Path("data/tiny/images", part), 8, 64)
        labels = Path("data/tiny/labels", part)
        labels.mkdir(parents=True)
        for number in range(8):
            (labels / f"{number}.txt").write_text("0 0.3 0.3 0.4 0.4\n1 0.6 0.7 0.3 0.5\n")
    described = "path: data/tiny\ntrain: images/train\nval: images/val\nnames: {0: ant, 1: bee}\n"
    Path("data/tiny.yaml").write_text(described)
    shutil.copy(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), "Arial.ttf")


def _boxes(images: Path, annotations: Path, count: int) -> None:
    """Write images of 64 pixels with two boxes each, as COCO describes them."""
    _images(images, count, 64)
    boxes = {1: [8, 8, 24, 24], 2: [30, 20, 20, 32]}
    marked = [
        {
            "id": 2 * image + kind,
            "image_id": image,
            "category_id": kind,
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
        }
        for image in range(count)
        for kind, box in boxes.items()
    ]
    described = {
        "images": [
            {"id": each, "file_name": f"{each}.png", "width": 64, "height": 64}
            for each in range(count)
        ],
        "categories": [{"id": 1, "name": "person"}, {"id": 2, "name": "bicycle"}],
        "annotations": marked,
    }
    annotations.parent.mkdir(exist_ok=True)
    annotations.write_text(json.dumps(described))


@inputs
def yolox() -> None:
    """Eight images with boxes."""
    _boxes(Path("data/train2017"), Path("data/annotations/boxes.json"), 8)


@inputs
def rtdetr() -> None:
    """Eight images with boxes, and the smallest RT-DETR's configuration for 64 pixels."""
    import yaml

    _boxes(Path("data/images"), Path("data/boxes.json"), 8)
    Path("output").mkdir()
    ops = [
        {"type": "RandomPhotometricDistort", "p": 0.5},
        {"type": "RandomHorizontalFlip"},
        {"type": "Resize", "size": [64, 64]},
        {"type": "ConvertPILImage", "dtype": "float32", "scale": True},
        {"type": "ConvertBoxes", "fmt": "cxcywh", "normalize": True},
    ]
    dataset = {"img_folder": "data/images", "ann_file": "data/boxes.json"}
    loader = {"num_workers": 0, "total_batch_size": 4}
    plain = [ops[2], ops[3]]
    settings = {
        "__include__": ["configs/rtdetrv2/rtdetrv2_r18vd_120e_coco.yml"],
        "output_dir": "output",
        "num_classes": 3,
        "remap_mscoco_category": False,
        "epoches": 1,
        "print_freq": 1,
        "eval_spatial_size": [64, 64],
        "PResNet": {"pretrained": False},
        "RTDETRTransformerv2": {"num_queries": 20, "num_denoising": 8},
        "RTDETRPostProcessor": {"num_top_queries": 20},
        "train_dataloader": {
            "dataset": {**dataset, "transforms": {"ops": ops, "policy": None}},
            "collate_fn": {"scales": None},
            **loader,
        },
        "val_dataloader": {"dataset": {**dataset, "transforms": {"ops": plain}}, **loader},
    }
    Path("tiny.yml").write_text(yaml.dump(settings))


@inputs
def comfyui() -> None:
    """A checkpoint with random weights: small Stable Diffusion 3, autoencoder, text encoder."""
    import torch
    from comfy.cli_args import args

    args.cpu = True  # before ComfyUI asks for a device
    from comfy import ops
    from comfy.clip_model import CLIPTextModel
    from comfy.ldm.modules.diffusionmodules.mmdit import MMDiT
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder
    from safetensors.torch import save_file

    plain = ops.disable_weight_init
    torch.manual_seed(0)
    described = json.loads(Path("comfy/sd1_clip_config.json").read_text())
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}
    transformer = {
        "in_channels": 16,
        "depth": 2,
        "adm_in_channels": 2048,
        "num_patches": 1024,
        "pos_embed_max_size": 32,
    }
    # ComfyUI takes the sizes of an autoencoder and of a text encoder from its own files.
    sizes = {
        "z_channels": 16,
        "resolution": 256,
        "in_channels": 3,
        "out_ch": 3,
        "ch": 128,
        "ch_mult": [1, 2, 4, 4],
    }
    sizes |= {"num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    parts = {
        "model.diffusion_model": MMDiT(
            None, context_embedder_config=embedder, operations=plain, **transformer
        ),
        "first_stage_model.encoder": Encoder(**sizes),
        "first_stage_model.decoder": Decoder(**sizes),
        "text_encoders.clip_l.transformer": CLIPTextModel(described, torch.float32, "cpu", plain),
    }
    weights = {}
    for part, model in parts.items():
        for name, value in model.state_dict().items():
            weights[f"{part}.{name}"] = _random(name, value).half()
    Path("models/checkpoints").mkdir(parents=True, exist_ok=True)
    save_file(weights, "models/checkpoints/small.safetensors")


def _random(name: str, like: Any) -> Any:
    """Return random weights: matrices that keep operands' size, norms of 1, no bias."""
    import torch

    if like.dim() > 1:
        return torch.randn(like.shape) / like[0].numel() ** 0.5
    return torch.ones(like.shape) if name.endswith("weight") else torch.zeros(like.shape)


@inputs
def diffusers() -> None:
    """Eight images, and the sizes of a small network."""
    _images(Path("data"), 8, 32)
    Path("unet").mkdir()
    sizes = {
        "sample_size": 32,
        "block_out_channels": [32, 32],
        "layers_per_block": 1,
        "norm_num_groups": 8,
    }
    blocks = {
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }
    Path("unet/config.json").write_text(
        json.dumps({"_class_name": "UNet2DModel", **sizes, **blocks})
    )


@inputs
def cifar10() -> None:
    """The files of airbench, with noise."""
    import torch

    Path("cifar10").mkdir()
    for name, count in (("train", 512), ("test", 128)):
        generator = torch.Generator().manual_seed(count)
        images = torch.randint(0, 255, (count, 32, 32, 3), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, 10, (count,), generator=generator)
        torch.save(
            {"images": images, "labels": labels, "classes": list("abcdefghij")},
            f"cifar10/{name}.pt",
        )


@inputs
def clip_weights() -> None:
    """A small random CLIP as a TorchScript archive, like OpenAI's, and an image."""
    import torch
    from clip.model import CLIP

    torch.manual_seed(0)
    model = CLIP(64, 64, 2, 64, 16, 77, 49408, 64, 1, 2)
    examples = torch.zeros(1, 3, 64, 64), torch.zeros(1, 77, dtype=torch.int64)
    torch.jit.trace(model, examples).save("clip.pt")
    _images(Path("data"), 1, 80)


@inputs
def sam_weights() -> None:
    """SAM's vit_b with random weights, and an image."""
    import torch
    from segment_anything import sam_model_registry

    torch.manual_seed(0)
    torch.save(sam_model_registry["vit_b"]().state_dict(), "sam.pth")
    _images(Path("data"), 1, 96)


@inputs
def detectron2() -> None:
    """The link to its configurations that its setup.py makes."""
    Path("detectron2/model_zoo/configs").symlink_to("../../configs")


@inputs
def whisper_weights() -> None:
    """A small whisper with random weights."""
    import torch
    from whisper.model import ModelDimensions, Whisper

    torch.manual_seed(0)
    sizes = ModelDimensions(80, 1500, 64, 2, 2, 51865, 448, 64, 2, 2)
    model = Whisper(sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.save({"dims": vars(sizes), "model_state_dict": model.state_dict()}, "whisper.pt")


@inputs
def hifigan_weights() -> None:
    """HiFi-GAN's third generator with random weights, and two spectrograms."""
    import shutil

    import torch
    from env import AttrDict
    from models import Generator

    torch.manual_seed(0)
    Path("cp").mkdir()
    shutil.copy("config_v3.json", "cp/config.json")
    generator = Generator(AttrDict(json.loads(Path("config_v3.json").read_text())))
    torch.save({"generator": generator.state_dict()}, "cp/g_0")
    Path("test_mel_files").mkdir()
    for name in "ab":
        np.save(
            f"test_mel_files/{name}.npy",
            np.random.default_rng(ord(name)).normal(-5, 2, (1, 80, 40)),
        )


@inputs
def speech() -> None:
    """16 wave files, and a list of them as HiFi-GAN reads it."""
    from scipy.io import wavfile

    Path("wavs").mkdir()
    for number in range(16):
        sound = np.random.default_rng(number).normal(0, 3000, 22_050).astype(np.int16)
        wavfile.write(f"wavs/{number}.wav", 22_050, sound)
    Path("list.txt").write_text("\n".join(f"{number}|a" for number in range(16)))


@inputs
def rvc() -> None:
    """Four seconds of noise, features and pitch as RVC prepares them for training, and sizes."""
    from scipy.io import wavfile

    settings = json.loads(Path("configs/v2/32k.json").read_text())
    settings["train"].update(log_interval=1, segment_size=3200)
    settings["model"].update(n_layers=1, filter_channels=64, upsample_initial_channel=64)
    folder = Path("logs/small")
    folder.mkdir(parents=True)
    Path("assets/weights").mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    lines = []
    for number in range(4):
        random = np.random.default_rng(number)
        frames = 100
        sound = random.normal(0, 0.1, frames * settings["data"]["hop_length"]).astype(np.float32)
        wavfile.write(folder / f"{number}.wav", 32_000, sound)
        pitch = random.uniform(80, 300, frames).astype(np.float32)
        parts = {"features": random.normal(size=(frames // 2, 768)).astype(np.float32)}
        parts |= {"coarse": (pitch // 2).astype(np.int64), "pitch": pitch}
        for name, values in parts.items():
            np.save(folder / f"{number}.{name}.npy", values)
        names = [
            f"{folder}/{number}.wav",
            *(f"{folder}/{number}.{name}.npy" for name in parts),
            "0",
        ]
        lines.append("|".join(names))
    (folder / "filelist.txt").write_text("\n".join(lines))


@inputs
def vits() -> None:
    """The extension in Cython, built as VITS' README says."""
    import subprocess

    Path("monotonic_align/monotonic_align").mkdir()
    subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd="monotonic_align", check=True
    )


@inputs
def wikitext() -> None:
    """Three texts."""
    folder = Path("data/wikitext-2")
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("train", "valid", "test")):
        sentences = words(4000 if name == "train" else 800, number).split(" . ")
        (folder / f"{name}.txt").write_text("\n".join(sentences) + "\n")


@inputs
def gpt_fast() -> None:
    """A model of the shape stories15M with random weights, and a tokenizer."""
    import sentencepiece
    import torch
    from model import Transformer

    folder = Path("checkpoints/stories15M")
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = Transformer.from_name("stories15M").to(torch.bfloat16)
    # The tokenizer has fewer words than the model; the model says only these.
    model.output.weight.data[24:] = 0
    torch.save({"model": model.state_dict()}, folder / "model.pth")
    Path("text.txt").write_text(words(3000).replace(" . ", "\n"))
    sentencepiece.SentencePieceTrainer.train(
        input="text.txt", model_prefix="tokenizer", vocab_size=24
    )
    Path("tokenizer.model").rename(folder / "tokenizer.model")


@inputs
def cora() -> None:
    """A graph of 2,000 papers in Cora's format."""
    random = np.random.default_rng(0)
    Path("cora").mkdir()
    classes = random.integers(0, 7, 2000)
    features = (
        random.random((2000, 64)) < 0.05 + 0.4 * (np.arange(64) % 7 == classes[:, None])
    ).astype(int)
    papers = (
        f"{number} {' '.join(map(str, row))} c{classes[number]}"
        for number, row in enumerate(features)
    )
    Path("cora/cora.content").write_text("\n".join(papers))
    Path("cora/cora.cites").write_text(
        "\n".join(f"{a} {b}" for a, b in random.integers(0, 2000, (6000, 2)))
    )


@inputs
def mutag() -> None:
    """120 molecules in the format of TUDataset."""
    folder = Path("data/TU/MUTAG/raw")
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    edges, graphs, nodes, labels = [], [], [], []
    for graph in range(120):
        label, size, begin = int(random.integers(0, 2)), int(random.integers(8, 16)), len(nodes)
        labels.append(2 * label - 1)
        graphs += [graph + 1] * size
        nodes += list(random.integers(0, 4 + 3 * label, size))
        for node in range(size):
            other = (node + 1 + label) % size
            edges += [(begin + node + 1, begin + other + 1), (begin + other + 1, begin + node + 1)]
    tables = {
        "A": [f"{a}, {b}" for a, b in edges],
        "graph_indicator": graphs,
        "graph_labels": labels,
        "node_labels": nodes,
    }
    for name, rows in tables.items():
        (folder / f"MUTAG_{name}.txt").write_text("\n".join(map(str, rows)) + "\n")


def _tokenizer() -> Any:
    """Return a tokenizer with up to 200 words, of which "<|endoftext|>" is the second."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<|endoftext|>"]
    tokenizer.train_from_iterator(
        [words(2000)], trainers.BpeTrainer(vocab_size=200, special_tokens=special)
    )
    return tokenizer


@inputs
def olmo() -> None:
    """A tokenizer, and a text as its numbers."""
    tokenizer = _tokenizer()
    tokenizer.save("tokenizer.json")
    np.array(tokenizer.encode(words(60_000)).ids, dtype=np.uint16).tofile("tokens.npy")


@inputs
def litgpt() -> None:
    """A small pythia with random weights, a tokenizer, and instructions."""
    import dataclasses

    import torch
    import yaml
    from litgpt import GPT, Config

    folder = Path("checkpoint")
    folder.mkdir()
    config = Config.from_name("pythia-14m", n_layer=2, block_size=256, padded_vocab_size=256)
    torch.manual_seed(0)
    torch.save(GPT(config).state_dict(), folder / "lit_model.pth")
    given = {
        each.name: getattr(config, each.name) for each in dataclasses.fields(config) if each.init
    }
    (folder / "model_config.yaml").write_text(yaml.dump(given))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>"})
    )
    asked = [
        {"instruction": words(5, seed), "input": "", "output": words(9, seed)} for seed in range(24)
    ]
    Path("asked.json").write_text(json.dumps(asked))


@inputs
def torchtune() -> None:
    """The weights of a small Llama."""
    import torch
    from torchtune.models.llama2 import llama2

    torch.manual_seed(0)
    Path("weights").mkdir()
    sizes = {
        "vocab_size": 2000,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "embed_dim": 64,
    }
    torch.save(llama2(**sizes, max_seq_len=256).state_dict(), "weights/small.pt")


@inputs
def deepspeed() -> None:
    """DeepSpeed's example configuration, with torch's AdamW for the one nvcc compiles."""
    config = json.loads(Path("ds_config_zero3.json").read_text())
    config["optimizer"]["params"]["torch_adam"] = True
    Path("torch_adam.json").write_text(json.dumps(config))


if __name__ == "__main__":
    INPUTS[sys.argv[1]]()
