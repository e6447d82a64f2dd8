// SPDX-License-Identifier: Apache-2.0

package wgbind

import (
	"net/netip"
	"sync/atomic"
)

// endpoint is where a peer is, and by which address of ours it talks to us.
type endpoint struct {
	dst netip.AddrPort
	src atomic.Pointer[source] // nil: the kernel chooses
}

// source is an address of this machine.
type source struct {
	addr netip.Addr
	// device is the index of the device of a link-local address, else 0: which device a
	// packet leaves by is the routing table's matter.
	device int32
}

// ClearSrc makes the kernel choose the source address again.
func (e *endpoint) ClearSrc() { e.src.Store(nil) }

// SrcIP is invalid when the kernel chooses.
func (e *endpoint) SrcIP() netip.Addr {
	if s := e.src.Load(); s != nil {
		return s.addr
	}
	return netip.Addr{}
}

func (e *endpoint) SrcToString() string {
	if addr := e.SrcIP(); addr.IsValid() {
		return addr.String()
	}
	return ""
}

func (e *endpoint) DstIP() netip.Addr   { return e.dst.Addr() }
func (e *endpoint) DstToString() string { return e.dst.String() }

func (e *endpoint) DstToBytes() []byte {
	b, _ := e.dst.MarshalBinary() // never fails
	return b
}

// unmap makes an IPv4 address of one that is mapped into IPv6, as a dual-stack socket
// has them.
func unmap(at netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
}
