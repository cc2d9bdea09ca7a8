"""
The process of llama.cpp's server. It ends with its standard input, so it does not outlive the program that started it.

    LLAMA_CPP_KEY=... python llama_cpp_process.py FILE NUM_POSITIONS NUM_SEQUENCES NUM_THREADS
"""

import os
import signal
import sys

import xllamacpp


def main(path: str, *numbers: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = map(int, numbers)
    params.cpuparams_batch.n_threads = params.cpuparams.n_threads
    # All sequences share the positions.
    params.kv_unified, params.warmup, params.n_gpu_layers, params.verbosity = True, False, 0, -1
    params.ui, params.api_keys = False, [os.environ["LLAMA_CPP_KEY"]]
    # By default, 8 GiB of earlier prompts stay in memory, and a long prompt gets comments every 30 seconds.
    params.cache_ram_mib, params.sse_ping_interval = 0, -1
    # Ctrl-C ends the answer, and not this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    # NOTE: the destructor of the server sometimes hangs.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
