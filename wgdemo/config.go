// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"bufio"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"

	"golang.zx2c4.com/wireguard/device"
)

// Config is what a configuration file says, in the form of wg-quick(8).
type Config struct {
	PrivateKey device.NoisePrivateKey
	// ListenPort is that of the UDP socket. Default 51820.
	ListenPort uint16
	// Addresses are those of the TUN device.
	Addresses []netip.Prefix
	// MTU is that of the TUN device. Default 1420.
	MTU   int
	Peers []PeerConfig
}

// PeerConfig is a peer.
type PeerConfig struct {
	PublicKey    device.NoisePublicKey
	PresharedKey device.NoisePresharedKey // zero for none
	AllowedIPs   []netip.Prefix
	// Endpoint is where the peer is at first; invalid where it comes by itself.
	Endpoint netip.AddrPort
	// Keepalive is in seconds, 0 for none.
	Keepalive uint16
}

const (
	defaultPort = 51820
	// maxMTU is what a TUN device takes.
	maxMTU = 65535
	minMTU = 576
)

// ParseConfig reads a configuration file. An error names the line.
func ParseConfig(r io.Reader) (*Config, error) {
	c := &Config{ListenPort: defaultPort, MTU: device.DefaultMTU}
	var section string
	var peer *PeerConfig
	seen := map[string]bool{}
	lines := bufio.NewScanner(r)
	for n := 1; lines.Scan(); n++ {
		text, _, _ := strings.Cut(lines.Text(), "#")
		text = strings.TrimSpace(text)
		if text == "" {
			continue
		}
		if strings.HasPrefix(text, "[") {
			switch section = strings.ToLower(text); section {
			case "[interface]":
			case "[peer]":
				c.Peers = append(c.Peers, PeerConfig{})
				peer = &c.Peers[len(c.Peers)-1]
				for key := range seen {
					if strings.HasPrefix(key, section) {
						delete(seen, key)
					}
				}
			default:
				return nil, fmt.Errorf("line %d: section %s is neither [Interface] nor [Peer]", n, text)
			}
			continue
		}
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("line %d: no \"=\"", n)
		}
		key, value = strings.ToLower(strings.TrimSpace(key)), strings.TrimSpace(value)
		if list := key == "address" || key == "allowedips"; seen[section+key] && !list {
			return nil, fmt.Errorf("line %d: %s is there twice", n, key)
		}
		seen[section+key] = true
		var err error
		switch section {
		case "[interface]":
			err = c.set(key, value)
		case "[peer]":
			err = peer.set(key, value)
		default:
			err = errors.New("it is in no section")
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %s: %w", n, key, err)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return c, c.check()
}

func (c *Config) check() error {
	if c.PrivateKey.IsZero() {
		return errors.New("[Interface] has no PrivateKey; make one with: wg genkey")
	}
	known := map[device.NoisePublicKey]bool{}
	for _, p := range c.Peers {
		switch {
		case p.PublicKey.IsZero():
			return errors.New("a [Peer] has no PublicKey")
		case known[p.PublicKey]:
			return fmt.Errorf("two peers have the public key %s", base64.StdEncoding.EncodeToString(p.PublicKey[:]))
		}
		known[p.PublicKey] = true
	}
	return nil
}

func (c *Config) set(key, value string) (err error) {
	switch key {
	case "privatekey":
		return parseKey(c.PrivateKey[:], value)
	case "listenport":
		c.ListenPort, err = parseNumber(value, 1)
	case "mtu":
		c.MTU, err = strconv.Atoi(value)
		if err == nil && (c.MTU < minMTU || c.MTU > maxMTU) {
			err = fmt.Errorf("%d is not in %d to %d", c.MTU, minMTU, maxMTU)
		}
	case "address":
		c.Addresses, err = parsePrefixes(c.Addresses, value, false)
	default:
		err = errors.New("unknown in [Interface]")
	}
	return err
}

func (p *PeerConfig) set(key, value string) (err error) {
	switch key {
	case "publickey":
		return parseKey(p.PublicKey[:], value)
	case "presharedkey":
		return parseKey(p.PresharedKey[:], value)
	case "allowedips":
		p.AllowedIPs, err = parsePrefixes(p.AllowedIPs, value, true)
	case "endpoint":
		p.Endpoint, err = netip.ParseAddrPort(value)
	case "persistentkeepalive":
		if value != "off" {
			p.Keepalive, err = parseNumber(value, 0)
		}
	default:
		err = errors.New("unknown in [Peer]")
	}
	return err
}

// parseKey never quotes the value, which may be a secret.
func parseKey(to []byte, value string) error {
	b, err := base64.StdEncoding.Strict().DecodeString(value)
	if err != nil || len(b) != len(to) {
		return fmt.Errorf("no base64 of %d bytes", len(to))
	}
	copy(to, b)
	return nil
}

func parseNumber(value string, low uint64) (uint16, error) {
	n, err := strconv.ParseUint(value, 10, 16)
	if err != nil || n < low {
		return 0, fmt.Errorf("%q is not in %d to 65535", value, low)
	}
	return uint16(n), nil
}

// parsePrefixes reads a list. Without a length an address stands for itself alone.
func parsePrefixes(all []netip.Prefix, value string, mask bool) ([]netip.Prefix, error) {
	for _, text := range strings.Split(value, ",") {
		text = strings.TrimSpace(text)
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			addr, bad := netip.ParseAddr(text)
			if bad != nil || addr.Zone() != "" {
				return nil, err
			}
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
		if mask {
			prefix = prefix.Masked()
		}
		all = append(all, prefix)
	}
	return all, nil
}

// uapi is the configuration in the words of wireguard-go, without the port, which is the
// group's. endpoints go before those of the configuration.
func (c *Config) uapi(endpoints map[device.NoisePublicKey]netip.AddrPort) string {
	var b strings.Builder
	fmt.Fprintf(&b, "private_key=%x\n", c.PrivateKey[:])
	for _, p := range c.Peers {
		fmt.Fprintf(&b, "public_key=%x\npreshared_key=%x\npersistent_keepalive_interval=%d\n", p.PublicKey[:], p.PresharedKey[:], p.Keepalive)
		at := p.Endpoint
		if known, ok := endpoints[p.PublicKey]; ok {
			at = known
		}
		if at.IsValid() {
			fmt.Fprintf(&b, "endpoint=%s\n", at)
		}
		for _, prefix := range p.AllowedIPs {
			fmt.Fprintf(&b, "allowed_ip=%s\n", prefix)
		}
	}
	return b.String()
}
