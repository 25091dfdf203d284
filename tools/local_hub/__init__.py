"""A Hugging Face Hub for one machine: the endpoints that publishing and loading a kernel need, on git repositories.

It is for tests, for the demo, and for people without access to the real one. It speaks the Hub's HTTP with the real
clients, `huggingface_hub` and `kernels`; HF_ENDPOINT is all that they need to be told. It listens on loopback only,
and every write needs its token. There is no LFS or Xet, and there are no pull requests: a Python kernel needs none.

`python -m tools.local_hub --help`. Needs starlette, uvicorn and pygit2.
"""
