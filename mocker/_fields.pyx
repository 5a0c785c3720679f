# cython: language_level=3
"""Reading the fields of records (`mocker.fields`), of which every simulation reads some dozens."""
from cpython.dict cimport PyDict_GetItem, PyDict_Next
from cpython.object cimport PyObject


cdef class Reader:
    """A descriptor that gives a record's value of one name; of a class it gives itself."""

    cdef public object name

    def __get__(self, record, owner):
        if record is None:
            return self
        return (<dict>record._values)[self.name]


def given(dict values, dict defaults):
    """Names of the values that are not the defaults themselves.

    Parameters
    ----------
    values : dict
        By name.
    defaults : dict
        Defaults by name; a name may have none.

    Returns
    -------
    list of str
        In the order of `values`.
    """
    cdef list names = []
    cdef Py_ssize_t at = 0, default_at = 0
    cdef PyObject* name
    cdef PyObject* value
    cdef PyObject* default_name
    cdef PyObject* default
    while PyDict_Next(values, &at, &name, &value):
        if not PyDict_Next(defaults, &default_at, &default_name, &default) or default_name != name:
            default = PyDict_GetItem(defaults, <object>name)       # another order
        if default != value:
            names.append(<object>name)
    return names
