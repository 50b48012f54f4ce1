"""All code that reads or writes memory at an address: no other file imports ``ctypes``.

What each file relies on, and what happens where that does not hold. Offsets and places are looked
for in memory and not assumed, and a second observation must agree, so a build that differs is
noticed before anything is written.

``object_fields``
    Relies on fields of torch's C++ objects being words at one offset in all objects of a class.
    Checked before the first use of a field: exactly one offset holds what torch answers for two
    objects. Any platform. Otherwise :class:`TorchVersionError`, from the operation that needs the
    field: moving a parameter between devices, resizing a storage of a simulated device. Memory at
    an address that a program or torch has just given is read as it is: nothing can be checked
    there.

``dlpack_alias``
    Relies on the unversioned C structure of DLPack, a standard; on CPython, where ``id`` is an
    address; on user addresses below 2^48, as on x86-64 and arm64; and on a little-endian processor.
    Checked at import: exactly one offset in capsules holds the pointers that they were made with.
    Otherwise :class:`TorchVersionError` when simulated devices are asked for, which alone need it.

``page_locked``
    Relies on the Itanium C++ ABI, the layout of tables of virtual functions on Linux and macOS, and
    on the headers and symbols of torch's libraries. Checked when simulated devices are asked for:
    by the order of functions in the header, the functions that Python overrides differ from the
    table of the class above, and the inherited ones are equal. Otherwise, as on Windows, torch
    keeps its own table, and raises its own error where a program needs page-locked memory in C++:
    ``DistributedDataParallel`` with unused parameters or a static graph.

``lazy_initialization``
    Relies on the Itanium C++ ABI, the names of functions on Linux and macOS, and on a function of
    torch's library for Python. Checked by its name, when a scope ends. On Windows torch keeps its
    notes.

``replace_new``
    Relies on CPython's layout of classes, with the global interpreter lock, in the main
    interpreter. Checked when ``engine="wrap"`` is installed: exactly one offset holds the slot in
    three classes of different kinds. Otherwise :class:`EngineUnavailableError`, and
    ``engine="auto"`` takes ``"mode"``.

``memory_windows``
    Relies on addresses that a Triton kernel computed, each of which the caller has found to be in a
    tensor's memory.

``compiled_loop``
    Relies on the C++ that a program gives ``torch.cuda.jiterator``, as CUDA does, and on a compiler
    that takes the options of g++ and clang++. Where there is none, the call is refused.
"""
