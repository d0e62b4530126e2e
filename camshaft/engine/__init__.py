"""The engine artifact: manifest, graph, weights, native code. The only thing that crosses from build to run."""
