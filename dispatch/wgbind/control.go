// SPDX-License-Identifier: Apache-2.0

package wgbind

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Room for control messages: the source address and the length of segments, which is an
// int on receipt and 16 bits when sent (udp(7)).
var (
	receiveControl = unix.CmsgSpace(unix.SizeofInet6Pktinfo) + unix.CmsgSpace(4)
	sendControl    = unix.CmsgSpace(unix.SizeofInet6Pktinfo) + unix.CmsgSpace(2)
)

// parseControl reads the address that a datagram came to and the length of its segments, 0
// when it was not joined.
func parseControl(control []byte, ipv6 bool) (src source, segment int) {
	for len(control) >= unix.SizeofCmsghdr {
		header, data, rest, err := unix.ParseOneSocketControlMessage(control)
		if err != nil {
			return src, segment
		}
		control = rest
		switch {
		case header.Level == unix.IPPROTO_IP && header.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			// struct in_pktinfo: device, ipi_spec_dst, ipi_addr.
			src.addr = netip.AddrFrom4([4]byte(data[4:8]))
		case header.Level == unix.IPPROTO_IPV6 && header.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			// struct in6_pktinfo: address, device.
			src.addr = netip.AddrFrom16([16]byte(data[:16])).Unmap()
			if src.addr.IsLinkLocalUnicast() && src.addr.Is6() {
				src.device = int32(binary.NativeEndian.Uint32(data[16:]))
			}
		case header.Level == unix.IPPROTO_UDP && header.Type == unix.UDP_GRO && len(data) >= 4:
			segment = int(int32(binary.NativeEndian.Uint32(data)))
		}
	}
	return src, segment
}

// appendSource makes a datagram leave with that address; nil makes the kernel choose. An
// IPv6 socket takes IPv4 addresses in mapped form (ip_cmsg_send in net/ipv4/ip_sockglue.c).
func appendSource(control []byte, src *source, ipv6 bool) []byte {
	switch {
	case src == nil:
		return control
	case ipv6:
		control, data := appendControl(control, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, unix.SizeofInet6Pktinfo)
		addr := src.addr.As16()
		copy(data, addr[:])
		binary.NativeEndian.PutUint32(data[16:], uint32(src.device))
		return control
	}
	control, data := appendControl(control, unix.IPPROTO_IP, unix.IP_PKTINFO, unix.SizeofInet4Pktinfo)
	addr := src.addr.As4()
	copy(data[4:], addr[:])
	return control
}

// appendSegment makes the kernel cut a datagram into pieces of that length.
func appendSegment(control []byte, length int) []byte {
	control, data := appendControl(control, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 2)
	binary.NativeEndian.PutUint16(data, uint16(length))
	return control
}

// appendControl appends a control message (cmsg(3)) whose data, all zero, is to be filled
// in.
func appendControl(control []byte, level, kind int32, length int) (all, data []byte) {
	start := len(control)
	control = append(control, make([]byte, unix.CmsgSpace(length))...)
	header := (*unix.Cmsghdr)(unsafe.Pointer(&control[start]))
	header.Level, header.Type = level, kind
	header.SetLen(unix.CmsgLen(length))
	return control, control[start+unix.CmsgLen(0):][:length]
}
