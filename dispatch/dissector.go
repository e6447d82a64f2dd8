// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"bytes"
	"fmt"

	"github.com/cilium/ebpf"
	classic "golang.org/x/net/bpf"

	"instar/bpf"
	"instar/dispatch/cbpf"
)

// Dissector is the function of SteeringCustom that says what names a packet's flow. It
// becomes a part of the kernel program when the group is made.
//
// It gets a struct sk_reuseport_md, whose data starts at the UDP header, and returns
//
//   - the cookie of a worker, 1 to 0xffff, that the server gave to the peer
//     ([Generation.Cookie]) and that this packet brings back: the packet goes to that
//     worker, or to the active generation when it has gone;
//   - 1<<63 | a key of 63 bits, that the peer made up, such as a hash of a session's name:
//     the first packet goes to the active generation and later ones of the same key follow
//     it, as far as Options.FlowEntries reach;
//   - 0 or 1<<62 for a packet of nobody, which goes to the active generation.
//
// A cookie does not tell a generation from an earlier one in the same slot. Groups use the
// slot again that was left longest ago; a peer that comes back after MaxGenerations
// upgrades may reach a server that does not know him.
type Dissector struct {
	linked bpf.Dissector
}

// ObjectDissector takes a function of a compiled eBPF object (ELF, little endian): the
// program of that name in a section "sk_reuseport", with the functions and maps that it
// uses. Its maps are its own, begin as the object says, and begin anew with
// [Group.UpgradeProgram].
//
// Errors: ErrOptions when there is no such program.
func ObjectDissector(object []byte, name string) (*Dissector, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		return nil, fmt.Errorf("%w: dissector: it is no eBPF object: %w", ErrOptions, err)
	}
	p := spec.Programs[name]
	if p == nil {
		return nil, fmt.Errorf("%w: dissector: the object has no program %q", ErrOptions, name)
	}
	if p.Type != ebpf.SkReuseport {
		return nil, fmt.Errorf("%w: dissector: program %q is of type %v; put it into SEC(\"sk_reuseport\")", ErrOptions, name, p.Type)
	}
	d := &Dissector{bpf.Dissector{Instructions: p.Instructions, Maps: make(map[string]*ebpf.MapSpec), Source: append([]byte(name+"\x00"), object...)}}
	for _, ins := range p.Instructions {
		if m := ins.Reference(); ins.IsLoadFromMap() && spec.Maps[m] != nil {
			d.linked.Maps[m] = spec.Maps[m]
		}
	}
	return d, nil
}

// ClassicDissector takes a classic BPF program (as of tcpdump -ddd; see [cbpf.Parse]), which
// sees the payload of the datagram as one of SO_ATTACH_REUSEPORT_CBPF does, and returns the
// cookie of a worker, or 0 or more than 0xffff for a packet of nobody. A load beyond the end
// of the packet ends it with 0. It is translated, and runs as fast as a compiled one.
//
// Errors: ErrOptions and a *cbpf.InstructionError for a program that is invalid, with the
// index of the instruction and the reason.
func ClassicDissector(program []classic.RawInstruction) (*Dissector, error) {
	code, err := cbpf.Translate(program, cbpf.Options{Context: cbpf.ReusePort})
	if err != nil {
		return nil, fmt.Errorf("%w: dissector: %w", ErrOptions, err)
	}
	return &Dissector{bpf.Dissector{Instructions: code, Source: []byte(cbpf.Format(program))}}, nil
}

// forLinking is nil for no dissector.
func (d *Dissector) forLinking() *bpf.Dissector {
	if d == nil {
		return nil
	}
	return &d.linked
}

// Cookie names a worker for a dissector of SteeringCustom: the server puts it into what its
// peers send back. It is never 0. Workers are counted from 0.
func (n *Generation) Cookie(worker int) uint16 { return ^uint16(n.Handle(worker)) }
