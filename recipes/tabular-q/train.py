"""Q-learning on a grid world, with nothing but the interpreter: it starts in milliseconds, even emulated.

The grid is the cliff walk of Sutton & Barto 2018, Reinforcement learning: an introduction, example 6.6:

    . . . . . . . . . . . .
    . . . . . . . . . . . .        every step costs 1, a step off the cliff 100 and back to S;
    . . . . . . . . . . . .        an episode ends at G
    S C C C C C C C C C C G

The shortest way, along the edge of the cliff, has a return of -13; no policy does better. The method is
Q-learning (Watkins 1989) with step size 0.5, epsilon 0.1 and no discount, as in that example.

    python train.py --episodes 500 --seed 0 --save table.json --evaluate
    python train.py --load table.json --episodes 0 --evaluate

`--load` takes up table, random state and episode count: training goes on as if never interrupted. What is
printed depends on the options alone, whatever the machine and the version of Python: the random numbers are
made here (SplitMix64: Steele, Lea & Flood 2014, Fast splittable pseudorandom number generators), and all else
is sums and products of IEEE 754 doubles.
"""

# Imports are what start-up time is made of (`python -X importtime`): argparse and json double it, each.
import sys

ROWS, COLUMNS = 4, 12
START, GOAL = (ROWS - 1) * COLUMNS, ROWS * COLUMNS - 1
CLIFF = range(START + 1, GOAL)
UP, RIGHT, DOWN, LEFT = range(4)
ARROWS = "^>v<"
BEST_RETURN = -13

STEP_SIZE = 0.5
EPSILON = 0.1
LONGEST = 1000  # steps; an untrained greedy policy may run in circles

VALUED = ("--episodes", "--seed", "--load", "--save")
FLAGS = ("--evaluate",)
USAGE = """\
usage: train.py [--episodes N] [--seed N] [--load FILE] [--save FILE] [--evaluate]

  --episodes N   episodes to train for (500)
  --seed N       seed of the random numbers (0)
  --load FILE    go on from a table that --save wrote
  --save FILE    write the table as JSON
  --evaluate     play an episode with the greedy policy afterwards, and print its return and the policy"""


class Agent:
    """The table of action values, and all that is needed to go on training."""

    def __init__(self, seed: int) -> None:
        self.values = [[0.0] * 4 for _ in range(ROWS * COLUMNS)]
        self.random_state = seed % 2**64
        self.episodes = 0

    def random(self) -> int:
        """Return the next random number, of 64 bits."""
        self.random_state = (self.random_state + 0x9E3779B97F4A7C15) % 2**64
        z = self.random_state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def greedy(self, cell: int) -> int:
        """Return the action with the highest value, the first of several."""
        row = self.values[cell]
        return row.index(max(row))

    def explore(self, cell: int) -> int:
        """Return the greedy action, or with probability EPSILON any action."""
        number = self.random()
        return number % 4 if number >> 32 < EPSILON * 2**32 else self.greedy(cell)


def step(cell: int, action: int) -> tuple[int, float]:
    """Return the next cell and the reward; against the border of the grid one stays where one is."""
    row, column = divmod(cell, COLUMNS)
    if action == UP:
        row = max(row - 1, 0)
    elif action == RIGHT:
        column = min(column + 1, COLUMNS - 1)
    elif action == DOWN:
        row = min(row + 1, ROWS - 1)
    else:
        column = max(column - 1, 0)
    reached = row * COLUMNS + column
    return (START, -100.0) if reached in CLIFF else (reached, -1.0)


def train_episode(agent: Agent) -> float:
    """Play one episode and learn from each of its steps; return the sum of its rewards."""
    total = 0.0
    cell = START
    for _ in range(LONGEST):
        action = agent.explore(cell)
        reached, reward = step(cell, action)
        target = reward if reached == GOAL else reward + max(agent.values[reached])
        agent.values[cell][action] += STEP_SIZE * (target - agent.values[cell][action])
        total += reward
        cell = reached
        if cell == GOAL:
            break
    agent.episodes += 1
    return total


def train(agent: Agent, episodes: int) -> None:
    """Train for `episodes` more episodes; print the mean return of every hundred, and of the rest."""
    returns: list[float] = []
    for left in reversed(range(episodes)):
        returns.append(train_episode(agent))
        if agent.episodes % 100 == 0 or left == 0:
            print(f"episode {agent.episodes:5d}  mean return {sum(returns) / len(returns):8.2f}", flush=True)
            returns.clear()


def evaluate(agent: Agent) -> None:
    """Play an episode with the greedy policy; print its return, and the action that each cell has."""
    total = 0.0
    cell = START
    for _ in range(LONGEST):
        cell, reward = step(cell, agent.greedy(cell))
        total += reward
        if cell == GOAL:
            break
    for row in range(ROWS):
        cells = range(row * COLUMNS, (row + 1) * COLUMNS)
        print(" ".join("C" if c in CLIFF else "G" if c == GOAL else ARROWS[agent.greedy(c)] for c in cells))
    reached = "reached" if cell == GOAL else "not reached"
    print(f"greedy return {total:.0f} (best possible {BEST_RETURN}), goal {reached}", flush=True)


def save(agent: Agent, path: str) -> None:
    """Write everything about `agent` to the file `path`."""
    import json

    with open(path, "w", encoding="utf-8") as file:
        json.dump(vars(agent), file)


def load(path: str) -> Agent:
    """Read what `save` wrote; raises ValueError or KeyError if that is something else."""
    import json

    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    agent = Agent(0)
    values = [[float(value) for value in row] for row in state["values"]]
    if [len(row) for row in values] != [4] * (ROWS * COLUMNS):
        raise ValueError(f"{path}: expected {ROWS * COLUMNS} rows of 4 values")
    agent.values = values
    agent.random_state, agent.episodes = int(state["random_state"]), int(state["episodes"])
    return agent


def parse(words: list[str]) -> dict[str, str]:
    """Return {option: value}, "" for a flag; ends the program with a message if there is something else."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word in ("-h", "--help"):
            print(USAGE)
            sys.exit(0)
        if word in FLAGS and not equals:
            options[word] = ""
        elif word in VALUED and (equals or rest):
            options[word] = value if equals else rest.pop(0)
        else:
            sys.exit(
                f"{USAGE}\n\ntrain.py: {word}: "
                + ("expected a value" if word in VALUED else "no such option")
            )
    for word in ("--episodes", "--seed"):
        if not options.get(word, "0").isdecimal():
            sys.exit(f"{USAGE}\n\ntrain.py: {word} {options[word]}: expected a whole number, 0 or more")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    agent = load(options["--load"]) if "--load" in options else Agent(int(options.get("--seed", "0")))
    train(agent, int(options.get("--episodes", "500")))
    if "--save" in options:
        save(agent, options["--save"])
    if "--evaluate" in options:
        evaluate(agent)


if __name__ == "__main__":
    main()
