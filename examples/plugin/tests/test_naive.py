from attn_backends.testing.conformance import BackendConformance


class TestNaive(BackendConformance):
    backend_name = "NAIVE"
