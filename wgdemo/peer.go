// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// keyPair is an identity.
type keyPair struct {
	private device.NoisePrivateKey
	public  device.NoisePublicKey
}

func newKeyPair() (k keyPair, err error) {
	private, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return k, fmt.Errorf("make key: %w", err)
	}
	copy(k.private[:], private.Bytes())
	copy(k.public[:], private.PublicKey().Bytes())
	return k, nil
}

// The addresses of the demonstration. Outside, each peer is connected with the gateway by a
// network of its own, every second one over IPv6.
var (
	innerGateway = netip.MustParseAddr("10.9.0.1")
	innerNetwork = netip.PrefixFrom(innerGateway, 16)
)

func innerPeer(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 1, byte(i)}) }

// outer are the gateway's and the peer's address outside.
func outer(i int) (gateway, peer netip.Prefix) {
	if i%2 == 1 {
		a := [16]byte{0: 0xfd, 15: 1, 7: byte(i)}
		b := a
		b[15] = 2
		return netip.PrefixFrom(netip.AddrFrom16(a), 64), netip.PrefixFrom(netip.AddrFrom16(b), 64)
	}
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), 1}), 24), netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i), 2}), 24)
}

// peer is a peer in user space, in a network namespace of its own.
type peer struct {
	number int
	keys   keyPair
	inner  netip.Addr
	ns     namespace
	gate   *gate
	dev    *device.Device
}

// newPeer makes the namespace and the device of a peer, which is down.
func newPeer(number int, gateway device.NoisePublicKey, log *device.Logger) (p *peer, err error) {
	p = &peer{number: number, inner: innerPeer(number)}
	if p.keys, err = newKeyPair(); err != nil {
		return nil, err
	}
	if p.ns, err = newNamespace(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make peer %d: %w", number, err), p.close())
		}
	}()
	ours, theirs := outer(number)
	if err := connect(fmt.Sprintf("peer%d", number), []netip.Prefix{ours}, p.ns, []netip.Prefix{theirs}); err != nil {
		return p, err
	}
	err = p.ns.run(func() error {
		inner, err := tun.CreateTUN("wg0", device.DefaultMTU)
		if err != nil {
			return fmt.Errorf("make TUN device: %w", err)
		}
		if p.gate, err = newGate(inner); err != nil {
			return errors.Join(err, inner.Close())
		}
		return errors.Join(p.gate.setOpen(true), setUpTUN("wg0", []netip.Prefix{netip.PrefixFrom(p.inner, innerNetwork.Bits())}))
	})
	if err != nil {
		return p, err
	}
	p.dev = device.NewDevice(p.gate, conn.NewStdNetBind(), log)
	config := Config{PrivateKey: p.keys.private, Peers: []PeerConfig{{
		PublicKey:  gateway,
		AllowedIPs: []netip.Prefix{innerNetwork.Masked()},
		Endpoint:   netip.AddrPortFrom(ours.Addr(), defaultPort),
	}}}
	return p, p.dev.IpcSet(config.uapi(nil))
}

// up makes the peer begin anew: it has no session, and a port of its own choice.
func (p *peer) up() error { return p.ns.run(p.dev.Up) }

func (p *peer) down() error { return p.dev.Down() }

// dial and listen make sockets inside.
func (p *peer) dial(ctx context.Context, network string, port int) (c net.Conn, err error) {
	err = p.ns.run(func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, network, netip.AddrPortFrom(innerGateway, uint16(port)).String())
		return err
	})
	return c, err
}

func (p *peer) listenUDP(port int) (c *net.UDPConn, err error) {
	err = p.ns.run(func() (err error) {
		c, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.inner, uint16(port))))
		return err
	})
	return c, err
}

func (p *peer) close() error {
	var err error
	switch {
	case p.dev != nil:
		p.dev.Close()
	case p.gate != nil:
		err = p.gate.Close()
	}
	return errors.Join(err, p.ns.close())
}
