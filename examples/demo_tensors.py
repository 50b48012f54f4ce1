"""Basic tensor work on the GPU."""

import torch

device = torch.device("cuda")
a = torch.randn(3, 4, device=device)
b = torch.ones(4, 2).cuda()
c = a @ b
print("product:", tuple(c.shape), "on", c.device)

x = torch.arange(6.0).to("cuda:0")
y = x.view(2, 3).t().contiguous()
y[y > 2] = 0
print("masked:", y.cpu().numpy().tolist())

z = torch.zeros_like(x, device=0)
z.copy_(x, non_blocking=True)
print("copied back unchanged:", torch.equal(z.cpu(), torch.arange(6.0)))

with torch.device("cuda"):
    print("default device:", torch.linspace(0, 1, 3).sum().item())

generator = torch.Generator(device="cuda").manual_seed(0)
first = torch.rand(2, generator=generator, device="cuda")
generator.manual_seed(0)
print("reproducible:", torch.equal(first, torch.rand(2, generator=generator, device="cuda")))
print("legacy:", torch.cuda.FloatTensor([1, 2]).sum().item(), isinstance(x, torch.cuda.FloatTensor))
print("half:", x.type(torch.cuda.HalfTensor).dtype, x.double().dtype)
