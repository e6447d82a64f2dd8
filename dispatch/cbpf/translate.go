// SPDX-License-Identifier: Apache-2.0

package cbpf

import (
	"fmt"
	"math"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/net/bpf"
)

// DefaultSymbol is the name of the translated function.
const DefaultSymbol = "dissect"

// Context is the type of eBPF program that a translation is part of.
type Context int

const (
	// SocketFilter is BPF_PROG_TYPE_SOCKET_FILTER, whose context is a struct
	// __sk_buff. The translation does what the classic program does with
	// SO_ATTACH_FILTER.
	SocketFilter Context = iota
	// ReusePort is BPF_PROG_TYPE_SK_REUSEPORT of a group of UDP sockets, whose
	// context is a struct sk_reuseport_md. The translation does what the classic
	// program does with SO_ATTACH_REUSEPORT_CBPF: it sees the payload.
	ReusePort
)

func (c Context) String() string {
	switch c {
	case SocketFilter:
		return "socket filter"
	case ReusePort:
		return "reuseport"
	}
	return fmt.Sprintf("Context(%d)", int(c))
}

// Options say what a translation is for.
type Options struct {
	// Context is the type of program that has the function; SocketFilter by
	// default.
	Context Context
	// Symbol is the name of the function, an identifier of C; [DefaultSymbol] by
	// default. Functions that it calls have names that begin with it and an
	// underscore.
	Symbol string
}

// Where the fields of struct sk_reuseport_md and struct __sk_buff are
// (include/uapi/linux/bpf.h).
const (
	mdData        = 0 // a pointer, like the next
	mdDataEnd     = 8
	mdLen         = 16
	mdEthProtocol = 20

	skbLen          = 0
	skbPktType      = 4
	skbMark         = 8
	skbQueueMapping = 12
	skbProtocol     = 16
	skbVlanPresent  = 20
	skbVlanTCI      = 24
	skbVlanProto    = 28
	skbIfIndex      = 40
	skbHash         = 68
)

// udpHeader is how far the packet of a ReusePort program begins before what
// the classic program sees: reuseport_select_sock pulls the header for it
// (run_bpf_filter in net/core/sock_reuseport.c).
const udpHeader = 8

// The registers. A is R0, so that a helper's result and the return value are in
// place; all others that keep a value survive calls.
const (
	regA    = asm.R0
	regCtx  = asm.R6 // where LD_ABS wants it
	regX    = asm.R7
	regData = asm.R8 // of the packet, at the UDP header
	regEnd  = asm.R9
)

// The stack, as offsets from R10. The verifier follows a number through an
// aligned slot of eight bytes, and forgets it in half a slot: savedA is to be
// followed, the others are not (see obscure).
const (
	savedA  = -8
	halfA   = -12
	halfX   = -20
	scratch = -28 // M[0]; M[i] is 8*i below
)

// directEnd is where what is read in place ends, counted from the UDP header:
// that far go the offset of an eBPF load and, nearly twice as far, what the
// verifier allows in packet pointers (MAX_PACKET_OFF).
const directEnd = math.MaxInt16

// Translate returns a function in eBPF that takes the context in R1 and returns
// the value of the classic program in R0, 32 bits of it. Other functions may
// follow it, which it calls. The instructions can be a program of their own or
// be appended to one that calls the symbol.
//
// A program that Check refuses is refused with the same error, and an ancillary
// load that the context has nothing for with an [*InstructionError].
func Translate(program []bpf.RawInstruction, o Options) (asm.Instructions, error) {
	if o.Context != SocketFilter && o.Context != ReusePort {
		return nil, fmt.Errorf("translate classic BPF program: there is no context %d: use SocketFilter or ReusePort", int(o.Context))
	}
	if err := Check(program); err != nil {
		return nil, err
	}
	if o.Symbol == "" {
		o.Symbol = DefaultSymbol
	}
	f := analyze(program)
	for i, ins := range program {
		if k, special := ancillary(ins); special && f.reachable[i] {
			if reason := refuseAncillary(k, o.Context); reason != "" {
				return nil, &InstructionError{i, ins, reason}
			}
		}
	}
	t := newTranslation(f, o)
	direct := o.Context == ReusePort && f.packet[0]
	if direct {
		t.copyOf(direct)
		t.copyOf(!direct)
	}
	// Conditional jumps lead from the first copy to the second.
	if !direct || grown(t.code) > math.MaxInt16 {
		t = newTranslation(f, o)
		t.entered[0] = true
		t.copyOf(false)
	}
	return t.finish(), nil
}

// refuseAncillary says why a context has no translation of an ancillary load.
func refuseAncillary(k uint32, c Context) string {
	switch k {
	case adProtocol, adCPU, adRandom, adALUXorX:
		return ""
	case adPktType, adIfIndex, adMark, adQueue, adRxHash, adVlanTag, adVlanTagPresent, adVlanTPID:
		if c == SocketFilter {
			return ""
		}
		return "a reuseport program in eBPF cannot read this: leave it out of the program"
	case adHatype:
		return "a program in eBPF cannot read the type of the device: leave it out of the program"
	case adPayOffset:
		return "a program in eBPF cannot ask for the offset of the payload: compute it from the headers, with ldx 4*([k]&0xf)"
	default:
		return "a program in eBPF cannot search for netlink attributes: attach the classic program as it is"
	}
}

// translation is the code in the making.
//
// With ReusePort there are two copies of the program. The direct one reads the
// packet in place, after few and large checks that so much of it is there. Where
// a check fails it goes over to the same instruction of the other copy, which
// calls a function for every load. That one copes with packets that are not
// linear, that are too short, and with offsets of all kinds.
type translation struct {
	*flow
	o      Options
	direct bool // the copy that is being made
	code   asm.Instructions
	// start is where each instruction is in the copies, !direct and direct.
	start [2][]int
	jumps []jump
	// entered says to which instructions of the checked copy something leads,
	// the direct copy or one of its own that is entered.
	entered []bool
	fresh   []bool // entered from the direct copy
	// covered is how much of the payload the direct copy knows to be in place
	// before an instruction.
	covered []uint32
	loaders map[uint32]bool // sizes for which there has to be a function
}

// jump is an instruction whose target is one of the classic program.
type jump struct {
	at     int
	direct bool
	target int
}

func newTranslation(f *flow, o Options) *translation {
	n := len(f.program)
	return &translation{
		flow: f, o: o,
		start:   [2][]int{make([]int, n), make([]int, n)},
		entered: make([]bool, n),
		fresh:   make([]bool, n),
		covered: make([]uint32, n),
		loaders: map[uint32]bool{},
	}
}

func index(direct bool) int {
	if direct {
		return 1
	}
	return 0
}

func (t *translation) emit(code ...asm.Instruction) { t.code = append(t.code, code...) }

// jumpTo emits a jump to an instruction of a copy.
func (t *translation) jumpTo(ins asm.Instruction, direct bool, target int) {
	t.jumps = append(t.jumps, jump{len(t.code), direct, target})
	t.emit(ins)
	if !direct && t.direct {
		t.entered[target], t.fresh[target] = true, true
	}
}

// copyOf appends a copy of the program.
func (t *translation) copyOf(direct bool) {
	t.direct = direct
	for i, ins := range t.program {
		if !t.reachable[i] || !direct && !t.entered[i] {
			continue
		}
		at := len(t.code)
		t.start[index(direct)][i] = at
		join := t.sources[i] > 1 || !direct && t.fresh[i]
		if join && direct && t.packet[i] {
			t.emit(asm.LoadMem(regData, regCtx, mdData, asm.DWord))
		}
		if join {
			t.obscure(i)
		}
		t.instruction(i, ins)
		t.code[at] = t.code[at].WithSource(asm.Comment(fmt.Sprintf("%d: %s", i, describe(ins))))
		for _, next := range t.next(i) {
			t.entered[next] = t.entered[next] || !direct
			if t.sources[next] == 1 {
				t.covered[next] = t.covered[i]
			}
		}
	}
}

// obscure makes the verifier forget what it knows about the registers, where
// ways meet.
//
// The verifier explores a place again for whatever it knows there that it did
// not know before, as when A was set to another constant on each way; ways that
// part and meet n times can make that 2^n. Having forgotten, all ways are the
// same to it, and its work grows with the length of the program only. Values
// that nobody reads again are left alone: it forgets them by itself.
func (t *translation) obscure(i int) {
	if !t.liveA[i] && !t.liveX[i] {
		return
	}
	t.emit(t.length(asm.R1))
	if t.liveA[i] {
		t.hide(regA, halfA)
	}
	if t.liveX[i] {
		t.hide(regX, halfX)
	}
}

// hide sends a register through memory whose content the verifier does not
// follow. It would still recognise a zero; so the value is mixed with R1, which
// it knows nothing about.
func (t *translation) hide(r asm.Register, at int16) {
	t.emit(
		asm.Xor.Reg32(r, asm.R1),
		asm.StoreMem(asm.R10, at, r, asm.Word),
		asm.LoadMem(r, asm.R10, at, asm.Word),
		asm.Xor.Reg32(r, asm.R1),
	)
}

// length loads the length of the packet, which no eBPF program knows before.
func (t *translation) length(r asm.Register) asm.Instruction {
	if t.o.Context == ReusePort {
		return asm.LoadMem(r, regCtx, mdLen, asm.Word)
	}
	return asm.LoadMem(r, regCtx, skbLen, asm.Word)
}

// instruction appends the translation of one instruction, like a case of
// bpf_convert_filter.
func (t *translation) instruction(i int, ins bpf.RawInstruction) {
	k := int32(ins.K)
	switch ins.Op & classMask {
	case classLd:
		switch ins.Op & modeMask {
		case modeImm:
			t.emit(asm.Mov.Imm32(regA, k))
		case modeMem:
			t.loadScratch(regA, ins.K)
		case modeLen:
			t.loadLen(regA)
		case modeAbs:
			if k, special := ancillary(ins); special {
				t.ancillary(k)
			} else {
				t.loadAbsolute(i, ins, regA)
			}
		case modeInd:
			t.loadIndirect(i, ins)
		}
	case classLdx:
		switch ins.Op & modeMask {
		case modeImm:
			t.emit(asm.Mov.Imm32(regX, k))
		case modeMem:
			t.loadScratch(regX, ins.K)
		case modeLen:
			t.loadLen(regX)
		case modeMsh:
			t.loadAbsolute(i, ins, regX)
			t.emit(asm.And.Imm32(regX, 0xf), asm.LSh.Imm32(regX, 2))
		}
	case classSt:
		t.storeScratch(regA, ins.K)
	case classStx:
		t.storeScratch(regX, ins.K)
	case classALU:
		t.alu(ins)
	case classJmp:
		t.conditional(i, ins)
	case classRet:
		if ins.Op&retA == 0 {
			t.emit(asm.Mov.Imm32(regA, k))
		}
		t.emit(asm.Return())
	case classMisc:
		if ins.Op&miscTXA != 0 {
			t.emit(asm.Mov.Reg32(regA, regX))
		} else {
			t.emit(asm.Mov.Reg32(regX, regA))
		}
	}
}

var aluOps = map[uint16]asm.ALUOp{
	aluAdd: asm.Add, aluSub: asm.Sub, aluMul: asm.Mul, aluDiv: asm.Div, aluMod: asm.Mod,
	aluAnd: asm.And, aluOr: asm.Or, aluXor: asm.Xor, aluLsh: asm.LSh, aluRsh: asm.RSh,
}

func (t *translation) alu(ins bpf.RawInstruction) {
	code := ins.Op & opMask
	op := aluOps[code]
	switch {
	case code == aluNeg:
		t.emit(asm.Neg.Imm32(regA, 0))
	case ins.Op&sourceX == 0:
		t.emit(op.Imm32(regA, int32(ins.K)))
	case code == aluDiv || code == aluMod:
		t.emit(skip(asm.JNE, regX, 0, 2))
		t.emit(returnZero()...)
		t.emit(op.Reg32(regA, regX))
	default:
		// A shift takes the low five bits of X, in both languages.
		t.emit(op.Reg32(regA, regX))
	}
}

// skip jumps over n instructions.
func skip(op asm.JumpOp, r asm.Register, value int32, n int16) asm.Instruction {
	ins := op.Imm32(r, value, "")
	ins.Offset = n
	return ins
}

// returnZero is how a program ends that goes wrong.
func returnZero() []asm.Instruction {
	return []asm.Instruction{asm.Mov.Imm32(regA, 0), asm.Return()}
}

var jumpOps = map[uint16]struct{ op, not asm.JumpOp }{
	jmpJEQ:  {asm.JEq, asm.JNE},
	jmpJGT:  {asm.JGT, asm.JLE},
	jmpJGE:  {asm.JGE, asm.JLT},
	jmpJSET: {asm.JSet, asm.InvalidJumpOp},
}

func (t *translation) conditional(i int, ins bpf.RawInstruction) {
	next := t.next(i)
	if len(next) == 1 {
		t.jumpTo(asm.Ja.Label(""), t.direct, next[0])
		return
	}
	compare := func(op asm.JumpOp) asm.Instruction {
		if ins.Op&sourceX != 0 {
			return op.Reg32(regA, regX, "")
		}
		return op.Imm32(regA, int32(ins.K), "")
	}
	ops := jumpOps[ins.Op&opMask]
	if ins.Jt == 0 && ops.not != asm.InvalidJumpOp {
		t.jumpTo(compare(ops.not), t.direct, next[1])
		return
	}
	t.jumpTo(compare(ops.op), t.direct, next[0])
	if ins.Jf != 0 {
		t.jumpTo(asm.Ja.Label(""), t.direct, next[1])
	}
}

// Scratch memory holds what was stored mixed with the length of the packet: see
// hide.

func scratchWord(k uint32) int16 { return scratch - 8*int16(k) }

func (t *translation) storeScratch(r asm.Register, k uint32) {
	t.emit(
		t.length(asm.R1),
		asm.Xor.Reg32(asm.R1, r),
		asm.StoreMem(asm.R10, scratchWord(k), asm.R1, asm.Word),
	)
}

func (t *translation) loadScratch(r asm.Register, k uint32) {
	t.emit(
		t.length(asm.R1),
		asm.LoadMem(r, asm.R10, scratchWord(k), asm.Word),
		asm.Xor.Reg32(r, asm.R1),
	)
}

func (t *translation) loadLen(r asm.Register) {
	t.emit(t.length(r))
	if t.o.Context == ReusePort {
		t.emit(asm.Sub.Imm32(r, udpHeader))
	}
}

func (t *translation) ancillary(k uint32) {
	field := func(offset int16) { t.emit(asm.LoadMem(regA, regCtx, offset, asm.Word)) }
	bigEndian := func() { t.emit(asm.HostTo(asm.BE, regA, asm.Half)) }
	switch k {
	case adALUXorX:
		t.emit(asm.Xor.Reg32(regA, regX))
	case adRandom:
		t.emit(asm.FnGetPrandomU32.Call(), asm.Mov.Reg32(regA, regA))
	case adCPU:
		t.emit(asm.FnGetSmpProcessorId.Call(), asm.Mov.Reg32(regA, regA))
	case adProtocol:
		if t.o.Context == ReusePort {
			field(mdEthProtocol)
		} else {
			field(skbProtocol)
		}
		bigEndian()
	case adIfIndex:
		// Without a device the program ends, and A is the result.
		t.emit(
			asm.LoadMem(asm.R1, regCtx, skbIfIndex, asm.Word),
			skip(asm.JNE, asm.R1, 0, 1),
			asm.Return(),
			asm.Mov.Reg32(regA, asm.R1),
		)
	case adPktType:
		field(skbPktType)
	case adMark:
		field(skbMark)
	case adQueue:
		field(skbQueueMapping)
	case adRxHash:
		field(skbHash)
	case adVlanTag:
		field(skbVlanTCI)
	case adVlanTagPresent:
		field(skbVlanPresent)
	case adVlanTPID:
		field(skbVlanProto)
		bigEndian()
	}
}

// finish joins the parts, and resolves the jumps.
func (t *translation) finish() asm.Instructions {
	for _, j := range t.jumps {
		target := t.start[index(j.direct)][j.target]
		distance := target - j.at - 1
		ins := &t.code[j.at]
		if distance > math.MaxInt16/maxGrowth && grown(t.code[j.at+1:target]) > math.MaxInt16 {
			// Only an unconditional jump leads that far.
			ins.OpCode, ins.Constant, ins.Offset = asm.LongJump("").OpCode, int64(distance), 0
			continue
		}
		ins.Offset = int16(distance)
	}
	var all asm.Instructions
	if t.touches(regCtx) {
		all = append(all, asm.Mov.Reg(regCtx, asm.R1))
	}
	if t.touches(regData) {
		all = append(all, asm.LoadMem(regData, asm.R1, mdData, asm.DWord))
	}
	if t.touches(regEnd) {
		all = append(all, asm.LoadMem(regEnd, asm.R1, mdDataEnd, asm.DWord))
	}
	if t.liveA[0] {
		all = append(all, asm.Mov.Imm32(regA, 0))
	}
	if t.liveX[0] {
		all = append(all, asm.Mov.Imm32(regX, 0))
	}
	all = function(t.o.Symbol, append(all, t.code...))
	offset := btf.FuncParam{Name: "offset", Type: &btf.Int{Name: "unsigned int", Size: 4}}
	for _, size := range []uint32{1, 2, 4} {
		if t.loaders[size] {
			all = append(all, function(t.loaderName(size), loader(size), offset)...)
		}
	}
	return all
}

// maxGrowth is the largest number of instructions that the kernel makes of one.
const maxGrowth = 8

// grown is how long code can get when the kernel replaces some instructions by
// several (convert_ctx_accesses and do_misc_fixups of kernel/bpf/verifier.c,
// bpf_gen_ld_abs of net/core/filter.c). Jumps over it have to fit then, too.
func grown(code asm.Instructions) int {
	n := 0
	for _, ins := range code {
		class, op := ins.OpCode.Class(), ins.OpCode.ALUOp()
		switch {
		case class == asm.LdClass:
			n += maxGrowth
		case class == asm.ALUClass && (op == asm.Div || op == asm.Mod),
			class == asm.LdXClass && ins.Src != asm.R10,
			ins.IsBuiltinCall():
			n += 5
		default:
			n++
		}
	}
	return n
}

// touches reports whether the code uses a register.
func (t *translation) touches(r asm.Register) bool {
	for _, ins := range t.code {
		// LD_ABS and LD_IND use the context without naming it.
		mode := ins.OpCode.Mode()
		implied := r == regCtx && ins.OpCode.Class() == asm.LdClass && (mode == asm.AbsMode || mode == asm.IndMode)
		if implied || ins.Src == r || ins.Dst == r {
			return true
		}
	}
	return false
}

// function gives code what a program with type information asks of each
// function: a type, and a line for the first instruction. LD_ABS and LD_IND
// want the type, too, to know that the function returns a number.
func function(name string, code asm.Instructions, params ...btf.FuncParam) asm.Instructions {
	params = append([]btf.FuncParam{{Name: "ctx", Type: &btf.Pointer{Target: &btf.Void{}}}}, params...)
	code[0] = btf.WithFuncMetadata(code[0].WithSymbol(name), &btf.Func{
		Name: name,
		Type: &btf.FuncProto{
			Return: &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed},
			Params: params,
		},
		Linkage: btf.StaticFunc,
	})
	if code[0].Source() == nil {
		code[0] = code[0].WithSource(asm.Comment(name))
	}
	return code
}
