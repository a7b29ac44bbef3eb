"""Random steps in environments that need extras."""

import sys

import gymnasium

for name in sys.argv[1:]:
    env = gymnasium.make(name, render_mode="rgb_array" if "Lunar" in name or "CartPole" in name else None)
    env.reset(seed=0)
    env.action_space.seed(0)
    total = sum(float(env.step(env.action_space.sample())[1]) for _ in range(20))
    frame = env.render().shape if env.render_mode else None
    print(name, round(total, 6), frame)
