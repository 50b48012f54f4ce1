"""Everything that touches memory through pointers, slots of types or iterators of C."""
