"""Vector code for numba, written with operators: the values in these classes are LLVM instructions being generated.

numba's cache does not notice a change in this file: delete the `__pycache__` beside it after one.
"""

from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def _width(element):
    return 32 if element == F32 else element.width


def _operator(on_floats, on_integers):
    def emit(self, other):
        name = on_floats if self.element == F32 else on_integers
        return Lanes(self.builder, getattr(self.builder, name)(self.value, self.operand(other)))

    return emit


def _comparison(sign):
    def emit(self, other):
        compare = self.builder.fcmp_ordered if self.element == F32 else self.builder.icmp_signed
        return Lanes(self.builder, compare(sign, self.value, self.operand(other)))

    return emit


class Lanes:
    """A vector. An operator is one instruction, on all lanes; its right side may be a number, the same for all lanes.

    Integers are signed, except that `>>` brings in zeros.
    """

    def __init__(self, builder, value):
        self.builder, self.value = builder, value
        self.element, self.count = value.type.element, value.type.count

    __add__, __sub__ = _operator("fadd", "add"), _operator("fsub", "sub")
    __truediv__ = _operator("fdiv", None)
    __and__, __or__ = _operator(None, "and_"), _operator(None, "or_")
    __lshift__, __rshift__ = _operator(None, "shl"), _operator(None, "lshr")
    __lt__, __gt__ = _comparison("<"), _comparison(">")

    def __neg__(self):
        return Lanes(self.builder, self.builder.fneg(self.value))

    def operand(self, other):
        return other.value if isinstance(other, Lanes) else ir.Constant(self.value.type, [other] * self.count)

    def constant(self, number):
        return Lanes(self.builder, self.operand(number))

    def where(self, yes, no):
        """Of a vector and a vector or number, the lanes of the first where this comparison holds."""
        return Lanes(self.builder, self.builder.select(self.value, yes.value, yes.operand(no)))

    def minimum(self, other):
        return (self < other).where(self, other)

    def maximum(self, other):
        return (self > other).where(self, other)

    def view(self, element):
        """The same bits as lanes of another type."""
        count = self.count * _width(self.element) // _width(element)
        return Lanes(self.builder, self.builder.bitcast(self.value, ir.VectorType(element, count)))

    def resize(self, element):
        """Integers cut to a narrower type, or filled up with zeros to a wider one."""
        convert = self.builder.trunc if element.width < self.element.width else self.builder.zext
        return Lanes(self.builder, convert(self.value, ir.VectorType(element, self.count)))

    def shuffle(self, order, other=None):
        """Lane i is lane order[i] of this vector; the other's lanes count on from the last of this."""
        order = ir.Constant(ir.VectorType(I32, len(order)), list(order))
        return Lanes(self.builder, self.builder.shuffle_vector(self.value, (other or self).value, order))

    def halves(self):
        middle = self.count // 2
        return self.shuffle(range(middle)), self.shuffle(range(middle, self.count))

    def lookup(self, table):
        """Lane i is lane self[i] of the table, which has as many. LLVM makes a permutation of it where it can."""
        found = ir.Constant(table.value.type, ir.Undefined)
        for i in range(self.count):
            position = self.builder.extract_element(self.value, ir.Constant(I32, i))
            entry = self.builder.extract_element(table.value, position)
            found = self.builder.insert_element(found, entry, ir.Constant(I32, i))
        return Lanes(self.builder, found)

    def rint(self):
        """To the nearest integer, halves to the even one."""
        return Lanes(self.builder, self._call("llvm.rint", self.value.type))

    def smallest(self):
        return self._call("llvm.vector.reduce.smin", self.element)

    def largest(self):
        return self._call("llvm.vector.reduce.smax", self.element)

    def _call(self, name, result):
        name += f".v{self.count}{'f' if self.element == F32 else 'i'}{_width(self.element)}"
        signature = ir.FunctionType(result, [self.value.type])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), [self.value])


class Memory:
    """An array from some element on. Offsets count elements of the array, whatever type is loaded or stored there."""

    def __init__(self, builder, pointer):
        self.builder, self.pointer = builder, pointer

    def _at(self, offset, kind):
        pointer = self.builder.gep(self.pointer, [ir.Constant(I32, offset)])
        return self.builder.bitcast(pointer, kind.as_pointer())

    def load(self, offset, element, count):
        return Lanes(self.builder, self.builder.load(self._at(offset, ir.VectorType(element, count)), align=1))

    def spread(self, offset, element, count):
        """One element in all lanes."""
        one = self.builder.load(self._at(offset, element))
        nothing = ir.Constant(ir.VectorType(element, count), ir.Undefined)
        return Lanes(self.builder, self.builder.insert_element(nothing, one, ir.Constant(I32, 0))).shuffle([0] * count)

    def store(self, offset, lanes):
        self.builder.store(lanes.value, self._at(offset, lanes.value.type), align=1)


def arrays(context, builder, signature, args):
    """array(i, index, stride): the Memory of argument i, an array, from its element index * stride on."""

    def array(i, index, stride=1):
        data = context.make_array(signature.args[i])(context, builder, args[i]).data
        return Memory(builder, builder.gep(data, [builder.mul(index, ir.Constant(index.type, stride))]))

    return array
