"""Frameworks for several processes."""

from benchmarks.programs.program import Program

_DEEPSPEED = "deepspeedai/DeepSpeed", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"
_TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"
_TWO = ("cpu", "simulated:cuda:2")
_NO_TRITON = "the program's: it imports triton, which torch's CPU build does not bring"
_NO_NVCC = "the program's: it looks for nvcc in torch's CUDA_HOME, which is None in a CPU build"
_MEGATRON = {
    "area": "distributed frameworks",
    "repository": "NVIDIA/Megatron-LM",
    "needs": ("pybind11", "einops", "six", "transformers"),
    "own": None,
    "faults": {"triton": _NO_TRITON, "NoneType": _NO_NVCC},
}

PROGRAMS = (
    Program(
        "Megatron run_simple_mcore_train_loop.py",
        commit="d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        command=f"{_TORCHRUN} 2 examples/run_simple_mcore_train_loop.py",
        given="the program's mock data; random weights; two processes, tensor parallel; five steps",
        differs="it draws its weights on the CPU (`use_cpu_initialization`) and seeds the "
        "generator of the GPU only."
        " On a CPU target that is the generator of the CPU; on a simulated or a real GPU each run "
        "has other weights",
        loss=r"Iteration 4: Losses reduced: \[\{'lm loss': tensor\(([\d.]+)",
        targets=_TWO,
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        **_MEGATRON,
    ),
    Program(
        "Megatron pretrain_gpt.py",
        commit="309ffca6a40553362d44fd17efc56b772fa1aa44",
        command=f"{_TORCHRUN} 1 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
        "--num-attention-heads 4"
        " --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
        "--train-iters 4"
        " --lr 1e-3 --lr-decay-style constant --mock-data --tokenizer-type NullTokenizer "
        "--vocab-size 8191"
        " --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
        "--log-interval 1"
        " --eval-iters 1 --eval-interval 100 --seed 1234 --no-masked-softmax-fusion --split 90,5,5",
        given="the program's mock data; random weights; one process; four steps",
        differs="its dropout draws on the GPU",
        loss=r"iteration +4/ +4 .*?lm loss: ([\d.E+-]+)",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        **_MEGATRON,
    ),
    *(
        Program(
            f"DeepSpeed ZeRO {stage}",
            "distributed frameworks",
            *_DEEPSPEED,
            command=f"{_TORCHRUN} 2 {{drivers}}/deepspeed_zero.py {stage}",
            given="random batches; a network of two layers with random weights; two processes; ten "
            "steps",
            needs=("hjson", "msgpack", "py-cpuinfo", "einops", "ninja", "pydantic"),
            loss=rf"stage {stage}: loss ([\d.]+)",
            targets=_TWO,
        )
        for stage in (1, 2, 3)
    ),
    Program(
        "DeepSpeed examples/sdma_allgather",
        "distributed frameworks",
        *_DEEPSPEED,
        command="train_zero3.py --deepspeed_config torch_adam.json --local_rank 0 --vocab_size 256 "
        "--hidden_size 64"
        " --num_layers 2 --num_heads 4 --max_seq_len 64 --num_samples 64 --train_steps 11 "
        "--data_mode arange",
        folder="examples/sdma_allgather",
        given="the program's synthetic tokens; random weights; one process, ZeRO 3; eleven steps;"
        " torch's AdamW in its configuration, in place of DeepSpeed's, which nvcc compiles",
        inputs="deepspeed",
        environment={
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29533",
        },
        needs=("hjson", "msgpack", "py-cpuinfo", "einops", "ninja", "pydantic"),
        loss=r"step +10 \| loss ([\d.]+)",
    ),
    Program(
        "torchtune full_finetune_single_device.py",
        "distributed frameworks",
        "pytorch/torchtune",
        "bd2a0fc7c31430972728494fa01aaeeb0ebf1ba1",
        command="recipes/full_finetune_single_device.py --config "
        "recipes/configs/llama2/7B_full_low_memory.yaml"
        " model._component_=torchtune.models.llama2.llama2 model.vocab_size=2000 model.num_layers=2"
        " model.num_heads=4 model.num_kv_heads=4 model.embed_dim=64 model.max_seq_len=256"
        " checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer"
        " checkpointer.checkpoint_dir=weights"
        " checkpointer.checkpoint_files=[small.pt] checkpointer.output_dir=out output_dir=out"
        " tokenizer.path=tests/assets/m.model tokenizer.max_seq_len=64 dataset.source=json"
        " dataset.data_files=tests/assets/alpaca_tiny.json dataset.split=train "
        "optimizer._component_=torch.optim.AdamW"
        " optimizer.lr=1e-3 optimizer_in_bwd=False seed=9 epochs=1 max_steps_per_epoch=3 "
        "dtype=fp32 compile=False"
        " enable_activation_offloading=False enable_activation_checkpointing=False"
        " metric_logger._component_=torchtune.training.metric_logging.StdoutLogger",
        own="device=cpu",
        given="the repository's own few instructions; random weights; three steps",
        inputs="torchtune",
        needs=(
            "torchao",
            "omegaconf",
            "sentencepiece",
            "tiktoken",
            "datasets",
            "blobfile",
            "torchdata",
        ),
        loss=r"Step 3 \| loss:([\d.]+)",
    ),
    Program(
        "litgpt finetune_full",
        "distributed frameworks",
        "Lightning-AI/litgpt",
        "26857050fe3ff627cd714fe92f5838f51a3d5efa",
        command="-m litgpt finetune_full checkpoint --data JSON --data.json_path asked.json"
        " --data.val_split_fraction 0.25"
        " --train.max_steps 3 --train.global_batch_size 2 --train.micro_batch_size 2 "
        "--train.lr_warmup_steps 1"
        " --eval.max_new_tokens 4 --precision 32-true --out_dir out --devices 1 --data.num_workers "
        "0",
        given="24 synthetic instructions; a small pythia with random weights; three steps",
        inputs="litgpt",
        needs=("lightning", "jsonargparse[signatures]", "tokenizers"),
        loss=r"val loss:? *([\d.]+)",
    ),
    Program(
        "examples/FSDP2",
        "distributed frameworks",
        "pytorch/examples",
        "77f55b912142e11fcfdf5b530231fb9c52f181e8",
        command=f"{_TORCHRUN} 2 example.py",
        folder="distributed/FSDP2",
        own=None,
        given="random tokens; random weights; two processes; ten steps, then a checkpoint",
        targets=_TWO,
        digest="checkpoints/*/*/model_state_dict.pt",
        faults={"sufficient 2 gpus": "a CPU target is one device; with `--devices 2` it is two"},
    ),
)
