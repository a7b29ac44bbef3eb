"""Numbers from numpy and the standard library: small enough to be built and run hundreds of times."""

import hashlib
import json

import numpy

generator = numpy.random.default_rng(0)
matrix = generator.normal(size=(40, 40))
print(f"{numpy.linalg.norm(matrix @ matrix.T):.9f}")
print(f"{numpy.sort(numpy.linalg.eigvalsh(matrix @ matrix.T))[-1]:.9f}")
print(numpy.histogram(matrix, bins=5)[0].tolist())
print(hashlib.sha256(json.dumps(matrix.tolist()).encode()).hexdigest())
try:
    numpy.linalg.solve(numpy.zeros((2, 2)), numpy.ones(2))
except numpy.linalg.LinAlgError as error:
    print(error)
