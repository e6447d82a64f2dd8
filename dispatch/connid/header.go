// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"encoding/binary"
	"errors"
)

// ErrTruncated says that a datagram ends within the part of the QUIC header
// that all versions share.
var ErrTruncated = errors.New("parse QUIC header: datagram is too short")

// The header that all versions of QUIC share (RFC 8999, section 5).
const (
	longHeaderBit = 0x80
	dcidLenOffset = 1 + 4             // after the first octet and the version
	dcidOffset    = dcidLenOffset + 1 // of a long header
	shortDCID     = 1                 // of a short header
)

// Header is what RFC 8999 fixes for all versions of QUIC, as far as the
// destination connection ID.
type Header struct {
	// Long tells a long header from a short one.
	Long bool

	// Version is that of a long header, 0 for Version Negotiation and for a
	// short header.
	Version uint32

	// DCID is the destination connection ID of a long header, 0 to 255 octets
	// within the datagram. It is nil for a short header, which does not carry
	// its length: see Codec.ShortDCID.
	DCID []byte
}

// ParseHeader reads the version-independent header of a datagram's first
// packet. The only error is [ErrTruncated]. A short header needs one octet; the
// source connection ID of a long one is not looked at.
func ParseHeader(datagram []byte) (Header, error) {
	if len(datagram) == 0 {
		return Header{}, ErrTruncated
	}
	if datagram[0]&longHeaderBit == 0 {
		return Header{}, nil
	}
	if len(datagram) < dcidOffset {
		return Header{}, ErrTruncated
	}
	end := dcidOffset + int(datagram[dcidLenOffset])
	if len(datagram) < end {
		return Header{}, ErrTruncated
	}
	return Header{
		Long:    true,
		Version: binary.BigEndian.Uint32(datagram[1:]),
		DCID:    datagram[dcidOffset:end:end],
	}, nil
}

// ShortDCID returns the octets of a short-header packet that hold the
// connection ID if it is one of this codec's, and false for a long header or
// a datagram that is too short to carry one.
func (c *Codec) ShortDCID(datagram []byte) ([]byte, bool) {
	end := shortDCID + c.Len()
	if len(datagram) < end || datagram[0]&longHeaderBit != 0 {
		return nil, false
	}
	return datagram[shortDCID:end:end], true
}

// Kind says whose connection ID a datagram carries.
type Kind uint8

const (
	// KindInvalid is a datagram that is no QUIC packet of any version.
	KindInvalid Kind = iota
	// KindOurs is a packet for an ID that verifies.
	KindOurs
	// KindForeignLong is a long header with any other ID: a client that has
	// none of ours yet, or one that a former generation gave out.
	KindForeignLong
	// KindForeignShort is a short header with any other ID, or with no room for
	// one of ours.
	KindForeignShort
)

// String is the kind in a word or two.
func (k Kind) String() string {
	switch k {
	case KindInvalid:
		return "invalid"
	case KindOurs:
		return "ours"
	case KindForeignLong:
		return "foreign long"
	case KindForeignShort:
		return "foreign short"
	}
	return "unknown"
}

// Class is what steering has to know about a datagram.
type Class struct {
	Kind Kind

	// Handle is the socket that the ID names, for KindOurs.
	Handle Handle

	// Affinity is Keys.AffinityHash of the DCID, for each long header.
	Affinity uint64

	// Long tells a long header from a short one.
	Long bool
}

// Classify parses a datagram and verifies the connection ID of its first
// packet. For generation see [Codec.Open]. It never fails and does not allocate.
func (c *Codec) Classify(datagram []byte, generation func(Handle) uint32) Class {
	header, err := ParseHeader(datagram)
	if err != nil {
		return Class{Kind: KindInvalid}
	}
	if header.Long {
		class := Class{Kind: KindForeignLong, Affinity: c.keys.AffinityHash(header.DCID), Long: true}
		if h, ok := c.Open(header.DCID, generation); ok {
			class.Kind, class.Handle = KindOurs, h
		}
		return class
	}
	if dcid, ok := c.ShortDCID(datagram); ok {
		if h, ok := c.Open(dcid, generation); ok {
			return Class{Kind: KindOurs, Handle: h}
		}
	}
	return Class{Kind: KindForeignShort}
}
