"""Programs that learn by reinforcement."""

from benchmarks.programs.program import Program

_CLEANRL = "vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb"

PROGRAMS = (
    Program(
        "CleanRL dqn.py",
        "reinforcement learning",
        *_CLEANRL,
        command="cleanrl/dqn.py --total-timesteps 3000 --learning-starts 500 --save-model",
        own="--no-cuda",
        given="CartPole of gymnasium; random weights; 250 updates, then ten episodes",
        needs=("gymnasium==0.29.1", "tyro", "tensorboard", "moviepy", "pygame"),
        result=r"eval_episode=9, episodic_return=\[([\d.]+)\]",
        differs="it evaluates in environments that it does not seed",
    ),
    Program(
        "CleanRL ppo.py",
        "reinforcement learning",
        *_CLEANRL,
        command="cleanrl/ppo.py --total-timesteps 3072",
        own="--no-cuda",
        given="CartPole of gymnasium; random weights; six iterations of 16 updates",
        needs=("gymnasium==0.29.1", "tyro", "tensorboard"),
        result=r"global_step=\d+, episodic_return=\[([\d.]+)\]",
        differs="it draws actions on the GPU",
    ),
)
