"""Random play of Atari Pong in the Arcade Learning Environment.

The environment (Bellemare, Naddaf, Veness & Bowling 2013: The Arcade Learning Environment, an
evaluation platform for general agents) is the emulator Stella behind Gymnasium's interface;
`ALE/Pong-v5` repeats every action for four frames and, with a probability of 0.25, ignores a new
action for a frame (Machado et al. 2018). The game itself comes with the package ale-py. Nothing is
learned here: the agent draws its actions uniformly.

    python play.py --steps 200

A random player loses nearly every point, one in about 45 steps.
"""

from __future__ import annotations

import argparse
import struct
import zlib
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np

gym.register_envs(ale_py)


def write_png(path: Path, image: np.ndarray) -> None:
    """Write an RGB image of shape (height, width, 3) as a PNG file."""
    height, width, _ = image.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    rows = b"".join(b"\0" + row.tobytes() for row in image)  # each row begins with filter 0
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Random play of Atari Pong.")
    parser.add_argument("--steps", type=int, default=200, help="steps to play")
    parser.add_argument("--seed", type=int, default=0, help="seed of environment and actions")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for frame.png")
    args = parser.parse_args()

    env = gym.make("ALE/Pong-v5")
    env.action_space.seed(args.seed)
    frame, _ = env.reset(seed=args.seed)
    episodes, total = 1, 0.0
    for step in range(1, args.steps + 1):
        frame, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        total += float(reward)
        if step % 50 == 0:
            print(f"step {step:5d}  reward so far {total:6.1f}", flush=True)
        if (terminated or truncated) and step < args.steps:
            frame, _ = env.reset()
            episodes += 1
    env.close()
    print(f"steps {args.steps}  episodes begun {episodes}  total reward {total:.1f}")

    args.out.mkdir(parents=True, exist_ok=True)
    write_png(args.out / "frame.png", frame)


if __name__ == "__main__":
    main()
