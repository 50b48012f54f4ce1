"""Programs about language."""

from benchmarks.programs.program import Program

_NANOGPT = Program(
    name="nanoGPT train.py",
    area="language",
    repository="karpathy/nanoGPT",
    commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    command="train.py config/train_shakespeare_char.py --max_iters=30 --lr_decay_iters=30 "
    "--eval_interval=15"
    " --eval_iters=4 --log_interval=10 --n_layer=2 --n_head=4 --n_embd=64 --block_size=64 "
    "--batch_size=8"
    " --dtype=float32 --compile=False",
    own="--device=cpu",
    given="38 kB of synthetic text by characters; random weights; 30 steps",
    inputs="nanogpt",
    loss=r"step 30: train loss ([\d.]+)",
    differs="its dropout draws on the GPU",
)

_OLMO = {
    "area": "language",
    "repository": "allenai/OLMo",
    "commit": "59a53e3f68e546330ca5a99ec626e58f9ab96494",
    # Without the data of its evaluations, which are large.
    "parts": ("/olmo/", "/scripts/", "/olmo_data/*.py", "/test_fixtures/*.yaml"),
    "inputs": "olmo",
    "needs": (
        "omegaconf",
        "cached_path",
        "boto3",
        "google-cloud-storage",
        "wandb",
        "scikit-learn",
        "datasets",
    ),
    "loss": r"train/CrossEntropyLoss=([\d.]+)",
}
_OLMO_TRAIN = (
    "-m torch.distributed.run --standalone --nproc-per-node {} scripts/train.py "
    "test_fixtures/train_tiny.yaml"
    " --run_name=tiny --save_folder=saved --data.paths=[tokens.npy] "
    "--tokenizer.identifier=tokenizer.json"
    " --model.vocab_size=59 --model.embedding_size=64 --model.eos_token_id=1 --model.pad_token_id=0"
    " --model.max_sequence_length=128 --model.attention_dropout=0 --model.residual_dropout=0"
    " --model.embedding_dropout=0"
)

PROGRAMS = (
    _NANOGPT,
    Program(
        "OLMo scripts/train.py",
        command=f"{_OLMO_TRAIN.format(1)} --distributed_strategy=single --precision=fp32 "
        "--model.init_device=cpu",
        given="60,000 synthetic tokens; random weights of its own tiny model; 14 steps in float32, "
        "after a checkpoint"
        " that is saved and loaded",
        **_OLMO,
    ),
    Program(
        "OLMo scripts/train.py, FSDP",
        command=f"{_OLMO_TRAIN.format(2)} --precision=amp_bf16",
        given="the same; two processes; 14 steps in bfloat16",
        targets=("cpu", "simulated:cuda:2"),
        differs="it draws its weights on the GPU; its own CPU mode computes in float32 and does "
        "not synchronize the"
        " processes",
        **_OLMO,
    ),
    Program(
        "vLLM, its layers and its sampler",
        "language",
        "vllm",
        "0.33.0",
        command="{drivers}/vllm_block.py",
        own="cpu",
        given="eight tokens; random weights; a block of a Llama by vLLM's own implementation in "
        "torch; then how many of"
        " its modules can be imported",
        needs=("vllm's dependencies without those that need CUDA",),
        differs="where it finds CUDA, modules can be imported too that ask for a GPU as they are",
        result=r"block: (.*)",
    ),
    Program(
        "SGLang, its parts in torch",
        "language",
        "sglang",
        "0.5.23",
        command="{drivers}/sglang_parts.py",
        own="cpu",
        given="random input; its rotary embedding, penalties and allocator of tokens; then how "
        "many of its modules can"
        " be imported",
        needs=("sglang's dependencies without those that need CUDA",),
        differs="where it finds CUDA, modules import `sgl_kernel`, which is compiled for CUDA and "
        "loads the driver",
        result=r"parts: (.*)",
    ),
    Program(
        "examples/word_language_model",
        "language",
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        command="main.py --accel --epochs 1 --model Transformer --emsize 32 --nhid 32 --batch_size "
        "8 --dry-run",
        folder="word_language_model",
        given="5,600 synthetic words; random weights; one step",
        inputs="wikitext",
        loss=r"End of training \| test loss +([\d.]+)",
        differs="its dropout draws on the GPU",
    ),
    Program(
        "gpt-fast generate.py --compile",
        "language",
        "meta-pytorch/gpt-fast",
        "6ecad9b5b6b987d17ac4303965545873d0192086",
        command="generate.py --compile --checkpoint_path checkpoints/stories15M/model.pth --prompt "
        "'the old dog'"
        " --max_new_tokens 6 --num_samples 1 --top_k 1",
        own="--device cpu",
        given="a tokenizer of synthetic words; random weights of the shape stories15M",
        inputs="gpt_fast",
        needs=("sentencepiece", "tiktoken"),
        result=r"\n(.*)\nTime for inference 1",
    ),
    Program(
        "RWKV-7 rwkv7_train_simplified.py",
        "language",
        "BlinkDL/RWKV-LM",
        "524481d5099b38d9bc8ef1e89209161b86c8011b",
        command="rwkv7_train_simplified.py",
        folder="RWKV-v7/train_temp",
        own=None,
        given="nothing",
        needs=("wandb", "ninja"),
        faults={
            "ExtensionRefusedError|nvcc|CUDA": (
                "its kernels are written in CUDA C++, and nvcc compiles them"
            )
        },
        loss=r"loss ([\d.]+)",
    ),
    Program(
        "modded-nanogpt train_gpt.py",
        "language",
        "KellerJordan/modded-nanogpt",
        "f411b3d346aa52d3504324ca93c230fd84c6c07f",
        command="-m torch.distributed.run --standalone --nproc-per-node 1 train_gpt.py",
        own=None,
        given="nothing",
        loss=r"val_loss:([\d.]+)",
        faults={
            "triton|kernels|ChildFailed": (
                "the program's: it needs an H100, Triton and FlashAttention 3"
            )
        },
    ),
    Program(
        "mamba_ssm",
        "language",
        "state-spaces/mamba",
        "e9594ce1c732d97440f0332fdc43170a2294dbfa",
        command="{drivers}/mamba_block.py",
        own=None,
        given="random input; random weights",
        needs=("einops", "transformers"),
        result=r"mean ([-\d.]+)",
        faults={
            "triton": "the program's: it imports Triton, which torch's CPU build does not bring",
            "selective_scan": "its kernels are written in CUDA C++, and nvcc compiles them",
        },
    ),
    Program(
        "fairseq train.py",
        "language",
        "facebookresearch/fairseq",
        "3d262bb25690e4eb2e7d3c1309b1e9c406ca4b99",
        command="train.py data --task language_modeling --arch transformer_lm",
        own="--cpu",
        given="nothing",
        needs=("hydra-core", "omegaconf", "sacrebleu", "bitarray", "cffi"),
        loss=r"loss ([\d.]+)",
        faults={"mutable default": "the program's: its dataclasses need Python 3.10 or earlier"},
    ),
)
