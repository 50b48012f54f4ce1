"""Whisper's lower-level example, weights from a file: ``whisper_decode.py WEIGHTS [cpu]``."""

import sys

import numpy as np
import whisper

model = whisper.load_model(sys.argv[1], device=sys.argv[2] if sys.argv[2:] else "cuda")
audio = whisper.pad_or_trim(np.sin(np.arange(16_000, dtype=np.float32) / 20))
mel = whisper.log_mel_spectrogram(audio, n_mels=model.dims.n_mels).to(model.device)
_, probs = model.detect_language(mel)
print(f"Detected language: {max(probs, key=probs.get)}")
half = str(model.device) != "cpu"
result = whisper.decode(model, mel, whisper.DecodingOptions(language="en", sample_len=8, fp16=half))
print(f"tokens: {result.tokens}, avg_logprob: {result.avg_logprob:.4f}")
