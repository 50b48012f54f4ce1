"""Programs about speech."""

from benchmarks.programs.program import Program

_HIFI_GAN = "jik876/hifi-gan", "4769534d45265d52a904b850da5a622601885777"

PROGRAMS = (
    Program(
        "SpeechBrain ASR_CTC",
        "speech",
        "speechbrain/speechbrain",
        "9c826ef3937bac885c8a6ca86c6889a30f256fb5",
        command="{drivers}/call.py tests/integration/ASR_CTC/example_asr_ctc_experiment.py main "
        "device=cuda",
        own="device=cpu",
        given="the repository's own samples of speech; random weights; 15 epochs",
        needs=("hyperpyyaml", "soundfile", "sentencepiece", "scipy", "joblib"),
        loss=r"Stage.VALID loss: ([\d.]+)",
        faults={
            "torchaudio|load this "
            "library": "the environment's: of torchaudio PyPI has builds for CUDA only"
        },
    ),
    Program(
        "whisper, the example of its README",
        "speech",
        "openai/whisper",
        "c0d2f624c09dc18e709e37c2ad90c039a4eb72a2",
        command="{drivers}/whisper_decode.py whisper.pt",
        own="cpu",
        given="a tone; random weights of a small model",
        inputs="whisper_weights",
        needs=("tiktoken", "numba", "more-itertools", "tqdm"),
        result=r"tokens: (.*)",
        differs="on the GPU it computes in float16",
    ),
    Program(
        "HiFi-GAN inference_e2e.py",
        "speech",
        *_HIFI_GAN,
        command="inference_e2e.py --checkpoint_file cp/g_0",
        given="two random spectrograms; random weights",
        inputs="hifigan_weights",
        needs=("scipy", "librosa"),
        digest="generated_files_from_mel/*.wav",
    ),
    Program(
        "HiFi-GAN train.py",
        "speech",
        *_HIFI_GAN,
        command="train.py --config config_v3.json --input_wavs_dir wavs --input_training_file "
        "list.txt"
        " --input_validation_file list.txt --training_epochs 1",
        own=None,
        given="16 seconds of noise; random weights",
        inputs="speech",
        needs=("scipy", "librosa==0.9.2", "tensorboard", "matplotlib"),
        loss=r"Gen Loss Total : ([\d.]+)",
        faults={"return_complex": "the program's: it calls torch.stft as torch before 2.0 allowed"},
    ),
    Program(
        "VITS train.py",
        "speech",
        "jaywalnut310/vits",
        "2e561ba58618d021b5b8323d3765880f7e0ecfdb",
        command="train.py -c configs/ljs_base.json -m ljs",
        own=None,
        given="nothing",
        inputs="vits",
        needs=("scipy", "librosa==0.9.2", "tensorboard", "cython", "unidecode", "phonemizer"),
        loss=r"loss=([\d.]+)",
        faults={"port|return_complex|mel()": "the program's: it is written for torch 1.6"},
    ),
    Program(
        "RVC train.train",
        "speech",
        "RVC-Project/Retrieval-based-Voice-Conversion-WebUI",
        "4338f12c3c28c80b3ac015e2d0df66c41592746d",
        command="-m train.train -e small -sr 32k -f0 1 -bs 2 -g 0 -te 1 -se 1 -l "
        "1 -c 0 -sw 0 -v v2",
        own="",
        given="four seconds of noise with random features and pitch; random weights of a narrower "
        "model; one epoch, in"
        " float16 on a GPU",
        inputs="rvc",
        environment={"RVC_CUDA_GRAPH": "0"},
        needs=("scipy", "librosa", "tensorboard", "matplotlib"),
        log="logs/small/train.log",
        loss=r"loss_disc=([\d.]+)",
        faults={
            "GPU rule": (
                "the program demands that the type of `torch.device('cuda:0')` is `cuda`, which a "
                "CPU target"
                " does not claim; simulated devices do"
            )
        },
        differs="it draws noise on the GPU, and computes in float16 there",
    ),
)
